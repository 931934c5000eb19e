// The generator over a table of logits: what ends replies, what is refused, and that a step of
// decoding takes no memory.
#include <cmath>
#include <functional>
#include <random>

#include "allocations.h"
#include "check.h"
#include "error.h"
#include "generator/generator.h"
#include "table_runner.h"

namespace headport::internal {
namespace {

constexpr std::size_t kSize = 41;

std::vector<std::vector<float>> table() {
  std::mt19937 random(0);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<std::vector<float>> found(kSize, std::vector<float>(kSize));
  for (auto& row : found) {
    for (float& each : row) each = normal(random);
  }
  return found;
}

Generator generator(std::size_t rows = 2, std::int64_t context = 64) {
  return Generator(std::make_unique<test::TableRunner>(table()), IdMap(kSize), rows, context);
}

Request request(std::int64_t limit) {
  Request found;
  found.max_new_tokens = limit;
  found.explicit_limit = true;
  return found;
}

void check_refused(const char* name, headport_status status, const std::function<void()>& work) {
  try {
    work();
    CHECK_NAMED(false, name);
  } catch (const Error& error) {
    CHECK_NAMED(error.status() == status, std::string(name) + ": " + error.what());
  }
}

void check_batch_and_single_agree() {
  const std::vector<Ids> prompts = {{1}, {2, 3}, {4}, {5}, {6, 7}};
  Request wanted = request(20);
  wanted.sampling.temperature = 1.0;
  wanted.seeds = {1, 2, 3, 4, 5};
  wanted.ends = {0, 9};
  const auto together = generator(3).generate({prompts.begin(), prompts.end()}, wanted);
  bool ended_early = false;
  for (std::size_t n = 0; n < prompts.size(); ++n) {
    Request alone = wanted;
    alone.seeds = {wanted.seeds[n]};
    const auto single = generator(1).generate({prompts[n]}, alone);
    CHECK(single[0].token_ids == together[n].token_ids);
    CHECK(single[0].finish == together[n].finish);
    const bool eos = together[n].finish == HEADPORT_EOS;
    const std::int64_t last = together[n].token_ids.back();
    CHECK(eos == (last == 0 || last == 9));
    CHECK(eos || together[n].token_ids.size() == 20);
    ended_early = ended_early || eos;
  }
  CHECK(ended_early);
}

void check_refusals() {
  const Ids prompt = {1, 2, 3}, empty, unknown = {1, 41}, negative = {-1};
  Generator made = generator(2, 16);
  const auto refused = [&](const char* name, headport_status status, const Ids& ids,
                           const Request& wanted) {
    check_refused(name, status, [&] { made.generate({ids}, wanted); });
  };
  check_refused("no prompt", HEADPORT_PROMPT_ERROR, [&] { made.generate({}, request(1)); });
  refused("empty", HEADPORT_PROMPT_ERROR, empty, request(1));
  refused("unknown id", HEADPORT_PROMPT_ERROR, unknown, request(1));
  refused("negative id", HEADPORT_PROMPT_ERROR, negative, request(1));
  refused("too long", HEADPORT_PROMPT_ERROR, prompt, request(14));
  CHECK(made.generate({prompt}, request(13))[0].token_ids.size() == 13);
  Request cut;  // what nobody asked for is cut to the context
  CHECK(made.generate({prompt}, cut)[0].token_ids.size() == 13);
  Generator limited(std::make_unique<test::TableRunner>(table()), IdMap(kSize), 1, 16, 5);
  CHECK(limited.generate({prompt}, cut)[0].token_ids.size() == 5);
  CHECK(limited.generate({prompt}, request(9))[0].token_ids.size() == 9);
  Request banned = request(2);
  for (std::int64_t id = 0; id < 41; ++id) banned.sampling.suppress_tokens.push_back(id);
  refused("all banned", HEADPORT_REQUEST_ERROR, prompt, banned);
  Request nan = request(2);
  nan.sampling.process_scores = [](const Context&, double* scores, const std::int64_t*,
                                   std::size_t) { scores[0] = NAN; };
  refused("NaN of a callback", HEADPORT_REQUEST_ERROR, prompt, nan);
  Request none = request(2);
  none.sampling.allowed = [](const Context&) { return AllowedAnswer{false, {}}; };
  refused("nothing allowed", HEADPORT_REQUEST_ERROR, prompt, none);
  std::atomic<bool> cancelled{true};
  Request ended = request(2);
  ended.cancelled = &cancelled;
  refused("cancelled", HEADPORT_CANCELLED, prompt, ended);
  Request stopped = request(5);
  std::size_t seen = 0;
  stopped.on_token = [&](const headport_token&) { return ++seen < 3; };
  refused("stopped by the callback", HEADPORT_CANCELLED, prompt, stopped);
  CHECK(seen == 3);
  auto broken = table();
  broken[3][5] = INFINITY;
  Generator damaged(std::make_unique<test::TableRunner>(broken), IdMap(kSize), 1, 16);
  check_refused("infinite logit", HEADPORT_NON_FINITE_ERROR,
                [&] { damaged.generate({prompt}, request(1)); });
}

void check_callbacks() {
  Request wanted = request(6);
  const Ids even = {2, 4, 6, 8};
  wanted.sampling.allowed = [&](const Context& context) {
    return context.tokens.size % 2 == 0 ? AllowedAnswer{false, even} : AllowedAnswer{};
  };
  wanted.sampling.process_scores = [](const Context&, double* scores, const std::int64_t* ids,
                                      std::size_t count) {
    for (std::size_t n = 0; n < count; ++n) {
      if (ids[n] == 8) scores[n] = -INFINITY;
    }
  };
  const Ids prompt = {1};
  const auto replies = generator().generate({prompt}, wanted);
  for (std::size_t n = 0; n < 6; n += 2) {
    const std::int64_t id = replies[0].token_ids[n];
    CHECK(id == 2 || id == 4 || id == 6);
  }
}

// From the second token on: the first call of an option may size its memory.
void check_no_allocation(const char* name, const Sampling& sampling, std::int64_t logprobs) {
  Request wanted = request(40);
  wanted.sampling = sampling;
  wanted.seeds = {7, 7};
  wanted.logprobs = logprobs;
  wanted.on_token = [](const headport_token& token) {
    if (token.step == 1) {
      test::allocations = 0;
      test::count_allocations(true);
    }
    if (token.step == 38) test::count_allocations(false);
    return true;
  };
  Generator made = generator();
  const std::vector<Ids> prompts = {{1, 2}, {3}};
  made.generate({prompts.begin(), prompts.end()}, wanted);
  test::count_allocations(false);
  CHECK_NAMED(test::allocations == 0,
              std::string(name) + ": " + std::to_string(test::allocations));
}

void check_allocations() {
  Sampling sampling;
  check_no_allocation("greedy", sampling, -1);
  check_no_allocation("greedy, likelihoods", sampling, 3);
  sampling.temperature = 1.0;
  check_no_allocation("temperature", sampling, -1);
  sampling.top_k = 20;
  sampling.top_p = 0.9;
  check_no_allocation("top-k, top-p", sampling, -1);
  sampling.min_p = 0.01;
  sampling.typical_p = 0.9;
  sampling.epsilon_cutoff = 0.001;
  sampling.eta_cutoff = 0.001;
  sampling.repetition_penalty = 1.1;
  sampling.presence_penalty = 0.1;
  sampling.frequency_penalty = 0.1;
  sampling.logit_bias = {{{5}, 1.0}, {{6}, 2.0}};
  sampling.no_repeat_ngram_size = 3;
  sampling.bad_words = {{7}, {8, 9}};
  sampling.min_new_tokens = 5;
  sampling.suppress_tokens = {10};
  check_no_allocation("everything", sampling, 2);
  sampling = {};
  sampling.allowed_ids = {1, 2, 3, 4, 5, 6, 7, 8};
  check_no_allocation("allowed", sampling, -1);
}

}  // namespace
}  // namespace headport::internal

int main() {
  using namespace headport::internal;
  check_batch_and_single_agree();
  check_refusals();
  check_callbacks();
  check_allocations();
  return headport::test::result();
}
