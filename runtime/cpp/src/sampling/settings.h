// How a token is chosen from a row, and what of the row's past the rules may look at.
// Mirrors runtime/sampling/settings.py; SAMPLING.md is the specification of both.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "span.h"

namespace headport::internal {

using Ids = std::vector<std::int64_t>;

// One sequence being continued. All ids are original ids.
struct Context {
  IdSpan prompt;
  IdSpan tokens;  // new tokens so far; their number is the step
  IdSpan ends;    // end tokens
  std::size_t index = 0;  // place of the prompt in its request, for messages
  std::uint64_t sample = 0;
  std::size_t limit = 0;  // most new tokens; 0 = not known

  std::size_t length() const { return prompt.size + tokens.size; }
  std::int64_t at(std::size_t n) const {
    return n < prompt.size ? prompt[n] : tokens[n - prompt.size];
  }
};

// What the callback says of one step: everything is allowed, or these ids are.
// An empty list is an error.
struct AllowedAnswer {
  bool all = true;
  IdSpan ids;  // valid until the callback is asked again
};

using AllowedCallback = std::function<AllowedAnswer(const Context&)>;
// (context, scores [K], original ids [K], K): changes scores in place; -inf bans.
using ScoresCallback =
    std::function<void(const Context&, double*, const std::int64_t*, std::size_t)>;

// The defaults are greedy and change nothing.
struct Sampling {
  double temperature = 0.0;  // 0 = greedy: the filters and the seed play no part
  std::int64_t top_k = 0;
  double top_p = 1.0;
  double min_p = 0.0;
  double typical_p = 1.0;
  double epsilon_cutoff = 0.0;
  double eta_cutoff = 0.0;

  std::vector<std::pair<Ids, double>> logit_bias;  // (sequence, added to its last id)
  double repetition_penalty = 1.0;
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  std::int64_t no_repeat_ngram_size = 0;
  std::vector<Ids> bad_words;
  std::int64_t min_length = 0;
  std::int64_t min_new_tokens = 0;
  Ids allowed_ids;  // empty = no list
  AllowedCallback allowed;
  std::optional<std::int64_t> forced_bos;  // the first new token, where the prompt is one token
  Ids forced_eos;  // the last token of a reply that reaches its limit
  Ids suppress_tokens;
  Ids begin_suppress_tokens;
  ScoresCallback process_scores;
};

enum class EarlyStopping { kNo, kYes, kNever };

// How beam search goes.
struct Beams {
  std::int64_t num_beams = 1;   // 1 = no beam search
  double length_penalty = 1.0;  // Σ ln p of a reply is divided by its tokens to this power
  EarlyStopping early_stopping = EarlyStopping::kNo;
};

// Later of two equal sequences holds, at the place of the earlier: what a Python mapping does.
inline void unite_equal_sequences(std::vector<std::pair<Ids, double>>& bias) {
  std::vector<std::pair<Ids, double>> found;
  for (auto& each : bias) {
    bool known = false;
    for (auto& other : found) {
      if (other.first == each.first) {
        other.second = each.second;
        known = true;
      }
    }
    if (!known) found.push_back(std::move(each));
  }
  bias = std::move(found);
}

}  // namespace headport::internal
