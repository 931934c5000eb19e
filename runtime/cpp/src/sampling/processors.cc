#include "sampling/processors.h"

#include <algorithm>

namespace headport::internal {

const Processor kProcessors[] = {
    {"logit_bias", [](const Sampling& s) { return !s.logit_bias.empty(); }, bias_scores},
    {"repetition_penalty", [](const Sampling& s) { return s.repetition_penalty != 1.0; },
     penalise_repetition},
    {"presence_and_frequency_penalty",
     [](const Sampling& s) { return s.presence_penalty != 0.0 || s.frequency_penalty != 0.0; },
     penalise_presence},
    {"no_repeat_ngram_size", [](const Sampling& s) { return s.no_repeat_ngram_size > 0; },
     ban_repeated_ngrams},
    {"bad_words", [](const Sampling& s) { return !s.bad_words.empty(); }, ban_bad_words},
    {"min_length, min_new_tokens",
     [](const Sampling& s) { return s.min_length > 0 || s.min_new_tokens > 0; }, ban_early_ends},
    {"allowed", [](const Sampling& s) { return s.allowed || !s.allowed_ids.empty(); },
     [](Row& row) {
       if (!row.allowed.all) keep_allowed(row);
     }},
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

}  // namespace headport::internal
