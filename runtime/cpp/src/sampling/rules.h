// The rules that change scores, one function each. `processors.cc` holds their order.
#pragma once

#include <vector>

#include "sampling/columns.h"
#include "sampling/settings.h"

namespace headport::internal {

// What a rule works on: one row's scores, changed in place, and memory that is taken once.
struct Row {
  double* scores;  // [K]
  const Columns& columns;
  const Sampling& sampling;
  const Context& context;
  AllowedAnswer allowed;  // asked for once per row and step
  Tally& tally;
  std::vector<std::pair<std::int64_t, double>>& sums;
  std::vector<std::uint8_t>& mask;        // [K]
  std::vector<std::int64_t>& identities;  // 0 … K - 1, made when a callback wants ids
  bool overruled = false;  // all that is allowed was banned by the rules before, which do not hold
};

// penalties.cc
// Id → what all sequences that it would complete add to it, in the order given.
void sum_biases(const Sampling& sampling, const Context& context,
                std::vector<std::pair<std::int64_t, double>>& sums);
void bias_scores(Row& row);
void penalise_repetition(Row& row);
void penalise_presence(Row& row);
// bans.cc
void ban_repeated_ngrams(Row& row);
void ban_bad_words(Row& row);
void ban_early_ends(Row& row);
void ban_suppressed(Row& row);
void ban_at_begin(Row& row);
// allowed.cc
AllowedAnswer ask_allowed(const Sampling& sampling, const Context& context);
void keep_allowed(Row& row);
// forced.cc
// The only ids that may come now, empty where nothing is forced.
IdSpan forced_ids(const Sampling& sampling, const Context& context);
void force_ids(Row& row);
// caller.cc
void ask_caller(Row& row);

}  // namespace headport::internal
