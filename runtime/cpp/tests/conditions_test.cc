// Conditions: the file that holds them, what it is refused for, and replies over a table that hidden
// states were told of.
#include <cmath>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>

#include "allocations.h"
#include "bundle/conditions.h"
#include "check.h"
#include "error.h"
#include "generator/generator.h"
#include "table_runner.h"

namespace headport::internal {
namespace {

using nlohmann::json;

struct Part {
  std::string name, dtype;
  std::vector<std::size_t> shape;
  std::vector<float> values;
};

std::string stored(const std::vector<Part>& parts) {
  json header = {{"__metadata__", {{"format", "pt"}}}};
  std::string body;
  for (const Part& each : parts) {
    const std::size_t first = body.size();
    body.append(reinterpret_cast<const char*>(each.values.data()), each.values.size() * sizeof(float));
    header[each.name] = {
        {"dtype", each.dtype}, {"shape", each.shape}, {"data_offsets", {first, body.size()}}};
  }
  const std::string text = header.dump();
  std::string found(sizeof(std::uint64_t), '\0');
  const std::uint64_t length = text.size();
  std::memcpy(found.data(), &length, sizeof length);
  return found + text + body;
}

// H = 3, C = 2.
const Part kWeight{"weight", "F32", {3, 2}, {1, 2, 0, 1, -1, 0.5f}};
const Part kBias{"bias", "F32", {3}, {0, 10, 0}};
const Part kPlain{"fixed.plain", "F32", {2}, {1, 1}};

Conditions sound() { return Conditions(stored({kWeight, kBias, kPlain}), "file", 3); }

void check_refused(const std::string& word, headport_status status,
                   const std::function<void()>& work) {
  try {
    work();
    CHECK_NAMED(false, word + ": nothing was refused");
  } catch (const Error& error) {
    CHECK_NAMED(error.status() == status, error.what());
    CHECK_NAMED(std::string(error.what()).find(word) != std::string::npos, error.what());
  }
}

void check_products() {
  Conditions made = sound();
  CHECK(made.size() == 2 && made.names() == std::vector<std::string>{"plain"});
  const std::vector<float>& plain = made.vector("plain");
  CHECK(plain == (std::vector<float>{3, 11, -0.5f}));
  CHECK(&made.vector("plain") == &plain && made.computed() == 1);
  const std::vector<float> values = {0, 2};
  CHECK(made.vector(Span<float>(values)) == (std::vector<float>{4, 12, 1}));
  CHECK(made.computed() == 2);
}

void check_wrong_requests() {
  Conditions made = sound();
  const std::vector<float> three(3), infinite = {0, INFINITY}, nan = {NAN, 0};
  check_refused("no condition 'fancy' in this bundle; known are plain", HEADPORT_REQUEST_ERROR,
                [&] { made.vector("fancy"); });
  check_refused("a name (plain) or 2 numbers, 3 were given", HEADPORT_REQUEST_ERROR,
                [&] { made.vector(Span<float>(three)); });
  for (const auto* each : {&infinite, &nan}) {
    check_refused("must be finite", HEADPORT_REQUEST_ERROR,
                  [&] { made.vector(Span<float>(*each)); });
  }
  CHECK(made.computed() == 0);
}

void check_wrong_files() {
  const auto refused = [](const std::string& word, const std::string& data,
                          headport_status status = HEADPORT_BUNDLE_ERROR) {
    check_refused(word, status, [&] { Conditions(data, "file", 3); });
  };
  const auto with = [](Part part, const std::function<void(Part&)>& change) {
    change(part);
    return part;
  };
  const std::string whole = stored({kWeight, kBias, kPlain});
  refused("too short", "");
  refused("its header is longer", whole.substr(0, 20));
  refused("do not fit its shape and the file", whole.substr(0, whole.size() - 1));
  refused("weight [hidden size, condition size] and bias", stored({kWeight}));
  refused("weight [hidden size", stored({kBias}));
  refused("weight [hidden size",
          stored({kWeight, with(kBias, [](Part& p) { p.shape = {2}, p.values = {0, 0}; })}));
  refused("bias holds NaN or infinity",
          stored({kWeight, with(kBias, [](Part& p) { p.values[1] = NAN; })}));
  refused("fixed.plain: fixed.NAME [2] was expected",
          stored({kWeight, kBias, with(kPlain, [](Part& p) { p.shape = {1}, p.values = {1}; })}));
  refused("other: fixed.NAME", stored({kWeight, kBias, with(kPlain, [](Part& p) { p.name = "other"; })}));
  refused("float32 was expected of bias, I32 was found",
          stored({kWeight, with(kBias, [](Part& p) { p.dtype = "I32"; })}), HEADPORT_UNSUPPORTED);
  check_refused("for hidden states of 3 values, the model gives 4", HEADPORT_BUNDLE_ERROR,
                [&] { Conditions(whole, "file", 4); });
}

// Ids 0 … 2; what follows is the one that the condition lifts.
Generator generator(bool takes) {
  const std::vector<std::vector<float>> table(3, {1.0f, 0.5f, 0.0f});
  std::optional<Conditions> conditions;
  if (takes) conditions = sound();
  return Generator(std::make_unique<test::TableRunner>(table), IdMap(3), 2, 64, 0, true, nullptr,
                   std::move(conditions));
}

Request request(std::vector<Condition> conditions) {
  Request found;
  found.max_new_tokens = 30;
  found.explicit_limit = true;
  found.conditions = std::move(conditions);
  return found;
}

void check_replies() {
  const std::vector<Ids> prompts = {{0}, {1}, {2}};
  const Condition none, named{"plain", {}}, values{{}, std::vector<float>{-8, 0}};
  Generator made = generator(true);
  const auto last = [](const Reply& reply) { return reply.token_ids.back(); };
  const auto each = made.generate({prompts.begin(), prompts.end()}, request({named, none, values}));
  CHECK(last(each[0]) == 1 && last(each[1]) == 0 && last(each[2]) == 1);
  CHECK(made.stats().condition_runs() == 2);
  const auto all = made.generate({prompts.begin(), prompts.end()}, request({named}));
  for (const Reply& reply : all) CHECK(reply.token_ids == Ids(30, 1));
  CHECK(made.stats().condition_runs() == 2);
  Request beams = request({named});
  beams.beams.num_beams = 2;
  CHECK(made.generate({prompts[0]}, beams)[0].token_ids == Ids(30, 1));
  check_refused("this bundle takes none", HEADPORT_REQUEST_ERROR,
                [&] { generator(false).generate({prompts[0]}, request({named})); });
  CHECK(last(generator(false).generate({prompts[0]}, request({none}))[0]) == 0);
  check_refused("no condition 'x'", HEADPORT_REQUEST_ERROR,
                [&] { made.generate({prompts[0]}, request({Condition{"x", {}}})); });
}

void check_allocations() {
  Request wanted = request({Condition{"plain", {}}});
  wanted.on_token = [](const headport_token& token) {
    if (token.step == 1) {
      test::allocations = 0;
      test::count_allocations(true);
    }
    if (token.step == 28) test::count_allocations(false);
    return true;
  };
  const Ids prompt = {0};
  generator(true).generate({prompt}, wanted);
  test::count_allocations(false);
  CHECK_NAMED(test::allocations == 0, std::to_string(test::allocations));
}

}  // namespace
}  // namespace headport::internal

int main() {
  using namespace headport::internal;
  check_products();
  check_wrong_requests();
  check_wrong_files();
  check_replies();
  check_allocations();
  return headport::test::result();
}
