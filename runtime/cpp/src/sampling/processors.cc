#include "sampling/processors.h"

#include <algorithm>

namespace headport::internal {
namespace {

// An id's biases count together.
void lifts_of_bias(const Sampling& sampling, const Context& context, const Visit& visit) {
  const auto acts = [&](const Ids& words) { return ends_with(context, words, words.size() - 1); };
  for (const auto& [words, _] : sampling.logit_bias) {
    double sum = 0.0;
    for (const auto& [others, bias] : sampling.logit_bias) {
      if (others.back() == words.back() && acts(others)) sum += bias;
    }
    if (sum > 0.0 && acts(words)) visit(words.back());
  }
}

void lifts_of_repetition(const Sampling& sampling, const Context& context, const Visit& visit) {
  if (sampling.repetition_penalty >= 1.0) return;
  for (std::size_t n = 0; n < context.length(); ++n) visit(context.at(n));
}

void lifts_of_presence(const Sampling& sampling, const Context& context, const Visit& visit) {
  if (std::min(sampling.presence_penalty, sampling.frequency_penalty) >= 0.0) return;
  for (const std::int64_t id : context.tokens) visit(id);
}

void lifts_of_forced(const Sampling& sampling, const Context& context, const Visit& visit) {
  for (const std::int64_t id : forced_ids(sampling, context)) visit(id);
}

}  // namespace

const Processor kProcessors[] = {
    {"logit_bias", [](const Sampling& s) { return !s.logit_bias.empty(); }, bias_scores,
     lifts_of_bias},
    {"repetition_penalty", [](const Sampling& s) { return s.repetition_penalty != 1.0; },
     penalise_repetition, lifts_of_repetition},
    {"presence_and_frequency_penalty",
     [](const Sampling& s) { return s.presence_penalty != 0.0 || s.frequency_penalty != 0.0; },
     penalise_presence, lifts_of_presence},
    {"no_repeat_ngram_size", [](const Sampling& s) { return s.no_repeat_ngram_size > 0; },
     ban_repeated_ngrams},
    {"bad_words", [](const Sampling& s) { return !s.bad_words.empty(); }, ban_bad_words},
    {"min_length, min_new_tokens",
     [](const Sampling& s) { return s.min_length > 0 || s.min_new_tokens > 0; }, ban_early_ends},
    {"allowed", [](const Sampling& s) { return s.allowed || !s.allowed_ids.empty(); },
     [](Row& row) {
       if (!row.allowed.all) keep_allowed(row);
     }},
    {"forced_bos, forced_eos",
     [](const Sampling& s) { return s.forced_bos.has_value() || !s.forced_eos.empty(); }, force_ids,
     lifts_of_forced},
    {"suppress_tokens", [](const Sampling& s) { return !s.suppress_tokens.empty(); },
     ban_suppressed},
    {"begin_suppress_tokens", [](const Sampling& s) { return !s.begin_suppress_tokens.empty(); },
     ban_at_begin},
    {"process_scores", [](const Sampling& s) { return static_cast<bool>(s.process_scores); },
     ask_caller},
};

const std::size_t kProcessorCount = sizeof(kProcessors) / sizeof(kProcessors[0]);

bool processing(const Sampling& sampling) {
  return std::any_of(kProcessors, kProcessors + kProcessorCount,
                     [&](const Processor& each) { return each.acts(sampling); });
}

void apply_processors(Row& row) {
  for (const Processor& each : kProcessors) {
    if (each.acts(row.sampling)) each.apply(row);
  }
}

void lift(const Sampling& sampling, const Context& context, const Visit& visit) {
  for (const Processor& each : kProcessors) {
    if (each.lifts != nullptr && each.acts(sampling)) each.lifts(sampling, context, visit);
  }
}

}  // namespace headport::internal
