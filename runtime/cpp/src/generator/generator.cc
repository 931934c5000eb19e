#include "generator/generator.h"

#include <algorithm>
#include <random>

#include "error.h"
#include "generator/beams.h"

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
                     std::int64_t max_context, std::int64_t reply_limit, bool exact,
                     std::shared_ptr<BundleTexts> texts, std::optional<Conditions> conditions)
    : runner_(std::move(runner)),
      ids_(std::move(ids)),
      columns_(ids_.pruned() ? Columns(ids_.ids()) : Columns(ids_.kept())),
      sampler_(columns_),
      most_rows_(most_rows),
      max_context_(max_context),
      reply_limit_(reply_limit),
      texts_(std::move(texts)),
      conditions_(std::move(conditions)),
      chooser_(make_chooser(*runner_, columns_, sampler_, stats_, exact)) {
  if (runner_->width() < ids_.kept()) {
    throw Error(HEADPORT_BUNDLE_ERROR, text(ids_.kept(), " logits per row expected, the head gives ",
                                            runner_->width()));
  }
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

std::vector<Sequence> Generator::sequences_of(const std::vector<IdSpan>& prompts,
                                              const Request& request) const {
  const std::vector<std::size_t> limits = limits_of(prompts, request);
  const bool written = request.texts || !request.stop.empty();
  if (written && texts_ == nullptr) {
    throw Error(HEADPORT_REQUEST_ERROR, "texts and stop texts need a bundle's tokenizer");
  }
  const Texts* texts = written ? &texts_->get() : nullptr;
  const std::size_t top = request.logprobs > 0 ? static_cast<std::size_t>(request.logprobs) : 0;
  std::vector<Sequence> found;
  for (std::size_t n = 0; n < prompts.size(); ++n) {
    const bool given = !request.seeds.empty();
    const bool has_seed = given || request.sampling.temperature > 0.0;
    const std::uint64_t seed = given ? request.seeds[n] : has_seed ? drawn_seed() : 0;
    // Beams make their replies themselves.
    const std::int64_t samples = request.beams.num_beams > 1 ? 1 : request.n;
    for (std::int64_t sample = 0; sample < samples; ++sample) {
      Sequence sequence;
      sequence.prompt = prompts[n];
      sequence.limit = limits[n];
      sequence.reply.prompt = n;
      sequence.reply.sample = static_cast<std::size_t>(sample);
      sequence.reply.has_seed = has_seed;
      sequence.reply.seed = seed;
      if (texts != nullptr) {
        sequence.text.emplace(*texts, request.stop);
        sequence.watched = request.on_token || !request.stop.empty();
      }
      // All memory is taken here, so that a step takes none; text takes its own as it grows.
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

void Generator::check_conditions(const Request& request) const {
  for (const Condition& each : request.conditions) {
    if (!each.name && !each.values) continue;
    if (!conditions_) {
      throw Error(HEADPORT_REQUEST_ERROR, "condition: this bundle takes none; export the model with "
                                          "--condition FILE");
    }
    if (each.name) conditions_->require_name(*each.name);
    if (each.values) conditions_->require_values(*each.values);
  }
}

// Takes each product once, whatever replies there are.
void Generator::tell_conditions(std::vector<Sequence>& sequences, const Request& request) {
  given_vectors_.clear();
  if (request.conditions.empty() || !conditions_) return;
  given_vectors_.reserve(request.conditions.size());  // so that they do not move
  std::vector<const float*> vectors;
  for (const Condition& each : request.conditions) {
    if (each.name) {
      vectors.push_back(conditions_->vector(*each.name).data());
    } else if (each.values) {
      given_vectors_.push_back(conditions_->vector(*each.values));
      vectors.push_back(given_vectors_.back().data());
    } else {
      vectors.push_back(nullptr);
    }
  }
  stats_.count_conditions(conditions_->computed());
  for (Sequence& each : sequences) {
    each.condition = vectors[vectors.size() == 1 ? 0 : each.reply.prompt];
  }
}

std::vector<Reply> Generator::generate(const std::vector<IdSpan>& prompts,
                                       const Request& request) {
  check_prompts(prompts, ids_.size());
  check_conditions(request);
  std::vector<Sequence> sequences = sequences_of(prompts, request);
  std::size_t capacity = 0;
  for (const Sequence& each : sequences) {
    capacity = std::max(capacity, each.prompt.size + each.limit);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  stop_if_cancelled(request);
  tell_conditions(sequences, request);
  if (request.beams.num_beams > 1) {
    runner_->reserve(static_cast<std::size_t>(request.beams.num_beams), capacity);
    return search(sequences, request);
  }
  const std::size_t rows = std::min(most_rows_, sequences.size());
  runner_->reserve(rows, capacity);
  chooser_->reserve(rows);
  running_.clear();
  running_.reserve(rows);
  draws_.reserve(rows);
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

std::vector<Reply> Generator::search(const std::vector<Sequence>& sequences,
                                     const Request& request) {
  std::vector<Reply> replies;
  for (const Sequence& each : sequences) {
    BeamSearch search(*runner_, *chooser_, sampler_, columns_, each, request);
    while (!search.done()) {
      stop_if_cancelled(request);
      search.step();
    }
    for (Reply& reply : search.replies()) {
      stats_.count_tokens(static_cast<std::int64_t>(reply.token_ids.size()));
      replies.push_back(std::move(reply));
    }
  }
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
    choose(request);
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

// One token for each running row.
void Generator::choose(const Request& request) {
  draws_.clear();
  for (std::size_t row = 0; row < running_.size(); ++row) {
    Reply& reply = running_[row]->reply;
    if (running_[row]->condition != nullptr) runner_->add(row, running_[row]->condition);
    Draw draw;
    draw.row = row;
    draw.sampling = &request.sampling;
    draw.key = {reply.seed, reply.token_ids.size(), reply.sample};
    draw.context = running_[row]->context(request);
    draw.logprobs = request.logprobs;
    draw.likelihoods = &reply.likelihoods;
    draw.top = &reply.top;
    draws_.push_back(draw);
  }
  chooser_->choose(draws_);
  stats_.count_tokens(static_cast<std::int64_t>(draws_.size()));
  for (const Draw& draw : draws_) {
    Sequence& sequence = *running_[draw.row];
    const std::string part = sequence.accept(draw.token, request);
    latest_[draw.row] = draw.token;
    if (!request.on_token) continue;
    const std::size_t count =
        sequence.reply.likelihoods.empty() ? 0
                                           : sequence.reply.top.size() /
                                                 sequence.reply.likelihoods.size();
    report(sequence, request, sequence.reply.top.size() - count, part);
  }
}

void Generator::report(const Sequence& sequence, const Request& request, std::size_t top_first,
                       const std::string& part) {
  const Reply& reply = sequence.reply;
  headport_likelihood likelihood{};
  headport_token token{reply.prompt, reply.sample,
                       static_cast<std::int64_t>(reply.token_ids.size()) - 1,
                       reply.token_ids.back(), reply.finish, nullptr,
                       sequence.text ? part.c_str() : nullptr, part.size()};
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
