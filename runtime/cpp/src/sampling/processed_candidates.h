// Candidates of a row whose scores the request's processors change. Mirrors
// runtime/sampling/processed_candidates.py.
//
// Bans and lifts do not depend on scores, so they are known before the head runs. The head is handed
// them as noise: a banned token is never picked, a lifted one always, and then no processor can move
// a token that was not picked above `cut`.
#pragma once

#include <vector>

#include "sampling/candidates.h"
#include "sampling/sampler.h"

namespace headport::internal {

// What is known of a row before its head runs.
struct Plan {
  bool acts = false;                  // whether any processor does
  std::vector<std::uint8_t> alive;    // whether no processor bans a column, [K]
  std::vector<std::size_t> lifted;    // columns that a processor may lift, each once
};

// Bans and lifts of a row; false where only all logits can tell.
bool plan_row(Sampler& sampler, const Columns& columns, const Sampling& sampling,
              const AllowedAnswer& allowed, const Context& context, Plan& plan);

// A head's noise row under which banned tokens are never picked and lifted ones always are.
void steer(const Plan& plan, float* noise);

// Turns picked candidates into processed ones. It owns the memory for that.
class CandidateProcessor {
 public:
  explicit CandidateProcessor(const Columns& columns) : columns_(columns) {}

  // Best first; false where all of them are banned. The candidates were picked under `steer`, so
  // that `cut` holds for all others.
  bool process(const Plan& plan, const Sampling& sampling, const Context& context,
               CandidateRow& row);

 private:
  const Columns& columns_;
  Tally tally_;
  std::vector<std::pair<std::int64_t, double>> sums_;
  std::vector<std::uint8_t> mask_;
  std::vector<std::int64_t> identities_;
  std::vector<std::int64_t> ids_;
  std::vector<double> scores_;
  std::vector<std::size_t> order_;
};

}  // namespace headport::internal
