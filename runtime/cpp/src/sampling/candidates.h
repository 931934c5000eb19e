// Choosing from a head that gives its best candidates instead of all logits. Mirrors
// runtime/sampling/candidates.py; SAMPLING.md has the rules.
//
// Every candidate's logit is exact up to `error`, and no other token's logit (+ noise, where noise
// was handed to the head) is above `cut`. A choice is made only where this decides it: the token is
// then the one that exact logits of the whole vocabulary would give.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "sampling/columns.h"
#include "sampling/noise.h"
#include "sampling/settings.h"

namespace headport::internal {

// The candidates of one row, best first, ties by lowest id.
struct CandidateRow {
  std::vector<std::int64_t> ids;  // original ids, [C]
  std::vector<double> logits;     // [C]
  std::size_t proved = 0;         // how many leading ones are in their true place
  double cut = 0.0;               // no other token's logit (+ noise) is above it
  double error = 0.0;             // of a logit

  std::size_t size() const { return ids.size(); }
  void clear() {
    ids.clear();
    logits.clear();
  }
};

// Bounds of Σ exp((z - z₁) / T) over all tokens that are no candidates; asked for by top-p alone.
using TailMass = std::function<std::pair<double, double>(double temperature)>;

// Whether the head should pick its candidates by logit and noise, not by logit alone.
bool wants_noise(const Sampling& sampling);
// Whether candidates can never decide: what acts depends on the whole row.
bool needs_all(const Sampling& sampling);

// What a head adds to its bounds: T times a bound of each token's noise, rounded up, and -inf for
// columns that are no token. float32 [width].
void noise_row(const Columns& columns, std::size_t width, double temperature, const NoiseKey& key,
               float* noise);

// Decides rows. It owns the memory for that, so deciding takes none.
class Decider {
 public:
  // The token that all exact logits would give, or nothing where that is not proved. The row's
  // candidates were picked without noise.
  std::optional<std::int64_t> decide(const CandidateRow& row, const Sampling& sampling,
                                     const NoiseKey& key, const TailMass& tail_mass);
  // The same of candidates that were picked with `noise_row`. `largest` is the largest exact logit
  // of the whole vocabulary, which min-p needs.
  std::optional<std::int64_t> decide_noisy(const CandidateRow& row, const Sampling& sampling,
                                           const NoiseKey& key, std::optional<double> largest);

 private:
  std::optional<std::int64_t> within_top_k(const CandidateRow& row, const Sampling& sampling,
                                           const NoiseKey& key);
  std::optional<std::int64_t> within_top_p(const CandidateRow& row, const Sampling& sampling,
                                           const NoiseKey& key, const TailMass& tail_mass);
  std::optional<std::int64_t> within_min_p(const CandidateRow& row, const Sampling& sampling,
                                           const NoiseKey& key);
  std::optional<std::size_t> best(const CandidateRow& row, std::size_t count, double temperature,
                                  const NoiseKey& key);

  CandidateRow kept_;
  std::vector<double> least_, greatest_, scores_;
};

}  // namespace headport::internal
