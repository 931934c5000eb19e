#include "generator/generator.h"

#include <algorithm>
#include <random>

#include "error.h"

namespace headport::internal {
namespace {

// Per reply, where neither the call nor the bundle says; runtime/prompts.py has the same number.
constexpr std::int64_t kNewTokens = 128;
constexpr int kSeedBits = 53;             // drawn seeds survive JSON readers that know float64 only

std::uint64_t drawn_seed() {
  std::random_device device;
  const std::uint64_t bits = std::uint64_t{device()} << 32 | device();
  return bits >> (64 - kSeedBits);
}

void stop_if_cancelled(const Request& request) {
  if (request.cancelled != nullptr && request.cancelled->load(std::memory_order_relaxed)) {
    throw Error(HEADPORT_CANCELLED, "the call was cancelled");
  }
}

void check_prompts(const std::vector<IdSpan>& prompts, std::int64_t vocab_size) {
  std::string faults;
  if (prompts.empty()) faults = "at least one prompt was expected, none was given";
  for (std::size_t n = 0; n < prompts.size(); ++n) {
    const char* joint = faults.empty() ? "" : "; ";
    if (prompts[n].empty()) faults += text(joint, "prompt ", n, " is empty");
    for (const std::int64_t id : prompts[n]) {
      if (id >= 0 && id < vocab_size) continue;
      faults += text(joint, "prompt ", n, " holds ", id, ", ids from 0 to ", vocab_size - 1,
                     " were expected");
      break;
    }
  }
  if (!faults.empty()) throw Error(HEADPORT_PROMPT_ERROR, faults);
}

}  // namespace

Generator::Generator(std::unique_ptr<Runner> runner, IdMap ids, std::size_t most_rows,
                     std::int64_t max_context, std::int64_t reply_limit)
    : runner_(std::move(runner)),
      ids_(std::move(ids)),
      columns_(ids_.pruned() ? Columns(ids_.ids()) : Columns(ids_.kept())),
      sampler_(columns_),
      most_rows_(most_rows),
      max_context_(max_context),
      reply_limit_(reply_limit) {
  if (runner_->width() < ids_.kept()) {
    throw Error(HEADPORT_BUNDLE_ERROR, text(ids_.kept(), " logits per row expected, the head gives ",
                                            runner_->width()));
  }
  if (!ids_.columns().empty()) ordered_.resize(ids_.kept());
}

// What the call asks for must fit the context; what the bundle or this file presets is cut to it.
std::vector<std::size_t> Generator::limits_of(const std::vector<IdSpan>& prompts,
                                              const Request& request) const {
  std::vector<std::size_t> limits;
  std::string faults;
  for (std::size_t n = 0; n < prompts.size(); ++n) {
    const auto length = static_cast<std::int64_t>(prompts[n].size);
    std::int64_t most = max_context_;
    const char* why = "the context";
    std::int64_t wanted = request.max_new_tokens;
    if (wanted == 0 && request.max_length > 0) {
      most = std::min(most, request.max_length);
      why = "the bundle's max_length";
      wanted = most - length;
    } else if (wanted == 0) {
      wanted = kNewTokens;
    }
    if (!request.explicit_limit && reply_limit_ > 0) wanted = std::min(wanted, reply_limit_);
    const std::int64_t needed = request.explicit_limit ? wanted : 1;
    if (length > most || needed > most - length) {
      faults += text(faults.empty() ? "" : "; ", "prompt ", n, " has ", length, " tokens and ",
                     request.explicit_limit ? text(needed) : "at least 1",
                     " more are to follow, but ", why, " holds ", most);
      continue;
    }
    limits.push_back(static_cast<std::size_t>(std::min(wanted, most - length)));
  }
  if (!faults.empty()) {
    throw Error(HEADPORT_PROMPT_ERROR, faults + "; shorten the prompt or lower max_new_tokens");
  }
  return limits;
}

std::vector<Generator::Sequence> Generator::sequences_of(const std::vector<IdSpan>& prompts,
                                                         const Request& request) const {
  const std::vector<std::size_t> limits = limits_of(prompts, request);
  const std::size_t top = request.logprobs > 0 ? static_cast<std::size_t>(request.logprobs) : 0;
  std::vector<Sequence> found;
  for (std::size_t n = 0; n < prompts.size(); ++n) {
    const bool given = !request.seeds.empty();
    const bool has_seed = given || request.sampling.temperature > 0.0;
    const std::uint64_t seed = given ? request.seeds[n] : has_seed ? drawn_seed() : 0;
    for (std::int64_t sample = 0; sample < request.n; ++sample) {
      Sequence sequence;
      sequence.prompt = prompts[n];
      sequence.limit = limits[n];
      sequence.reply.prompt = n;
      sequence.reply.sample = static_cast<std::size_t>(sample);
      sequence.reply.has_seed = has_seed;
      sequence.reply.seed = seed;
      // All memory is taken here, so that a step takes none.
      sequence.reply.token_ids.reserve(limits[n]);
      if (request.logprobs >= 0) {
        sequence.reply.likelihoods.reserve(limits[n]);
        sequence.reply.top.reserve(limits[n] * std::min(top, columns_.size()));
      }
      found.push_back(std::move(sequence));
    }
  }
  return found;
}

std::vector<Reply> Generator::generate(const std::vector<IdSpan>& prompts,
                                       const Request& request) {
  check_prompts(prompts, ids_.size());
  std::vector<Sequence> sequences = sequences_of(prompts, request);
  std::size_t capacity = 0;
  for (const Sequence& each : sequences) {
    capacity = std::max(capacity, each.prompt.size + each.limit);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  stop_if_cancelled(request);
  const std::size_t rows = std::min(most_rows_, sequences.size());
  runner_->reserve(rows, capacity);
  running_.clear();
  running_.reserve(rows);
  latest_.assign(rows, 0);
  reported_.clear();
  if (request.logprobs > 0) {
    reported_.reserve(std::min(static_cast<std::size_t>(request.logprobs), columns_.size()));
  }
  run(sequences, request);
  std::vector<Reply> replies;
  replies.reserve(sequences.size());
  for (Sequence& each : sequences) replies.push_back(std::move(each.reply));
  return replies;
}

void Generator::run(std::vector<Sequence>& sequences, const Request& request) {
  const std::size_t rows = latest_.size();
  std::size_t waiting = 0;  // the first sequence that has no row yet
  while (waiting < sequences.size() || !running_.empty()) {
    stop_if_cancelled(request);
    if (!running_.empty()) runner_->step(latest_.data(), running_.size());
    while (waiting < sequences.size() && running_.size() < rows) {
      stop_if_cancelled(request);
      runner_->begin(running_.size(), sequences[waiting].prompt);
      running_.push_back(&sequences[waiting++]);
    }
    const float* logits = runner_->logits(running_.size());
    for (std::size_t row = 0; row < running_.size(); ++row) {
      advance(*running_[row], ordered(logits + row * runner_->width()), request);
      latest_[row] = running_[row]->reply.token_ids.back();
    }
    // The last row moves into the place of one that has ended, so that rows stay side by side.
    for (std::size_t row = running_.size(); row-- > 0;) {
      if (running_[row]->reply.finish == HEADPORT_NOT_FINISHED) continue;
      const std::size_t last = running_.size() - 1;
      if (row != last) {
        runner_->copy(last, row);
        running_[row] = running_[last];
        latest_[row] = latest_[last];
      }
      running_.pop_back();
    }
  }
}

const float* Generator::ordered(const float* logits) {
  if (ordered_.empty()) return logits;
  for (std::size_t n = 0; n < ordered_.size(); ++n) ordered_[n] = logits[ids_.columns()[n]];
  return ordered_.data();
}

void Generator::advance(Sequence& sequence, const float* logits, const Request& request) {
  Reply& reply = sequence.reply;
  const NoiseKey key{reply.seed, reply.token_ids.size(), reply.sample};
  const Context context{sequence.prompt, reply.token_ids, request.ends, reply.prompt,
                        reply.sample};
  const std::int64_t token = sampler_.choose(logits, request.sampling, key, context);
  const std::size_t top_first = reply.top.size();
  if (request.logprobs >= 0) {
    reply.likelihoods.push_back(sampler_.likelihood(
        token, logits, request.sampling, static_cast<std::size_t>(request.logprobs), reply.top));
  }
  reply.token_ids.push_back(token);
  if (std::find(request.ends.begin(), request.ends.end(), token) != request.ends.end()) {
    reply.finish = HEADPORT_EOS;
  } else if (reply.token_ids.size() == sequence.limit) {
    reply.finish = HEADPORT_LENGTH;
  }
  if (request.on_token) report(sequence, request, top_first);
}

void Generator::report(const Sequence& sequence, const Request& request, std::size_t top_first) {
  const Reply& reply = sequence.reply;
  headport_likelihood likelihood{};
  headport_token token{reply.prompt, reply.sample,
                       static_cast<std::int64_t>(reply.token_ids.size()) - 1,
                       reply.token_ids.back(), reply.finish, nullptr};
  if (request.logprobs >= 0) {
    reported_.clear();
    for (std::size_t n = top_first; n < reply.top.size(); ++n) {
      reported_.push_back({reply.top[n].token_id, reply.top[n].logprob});
    }
    likelihood = {reply.likelihoods.back().logprob, reply.likelihoods.back().processed_logprob,
                  reported_.data(), reported_.size()};
    token.likelihood = &likelihood;
  }
  if (!request.on_token(token)) {
    throw Error(HEADPORT_CANCELLED, text("prompt ", reply.prompt, ", step ", token.step,
                                         ": the callback of tokens ended the call"));
  }
}

}  // namespace headport::internal
