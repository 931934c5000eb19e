// What a head is asked for that gives candidates. Rows are those of the runner.
#pragma once

#include <cstdint>

#include "span.h"

namespace headport::internal {

// The M best tokens of N rows, sorted by logit, ties by lowest column. Logits are products with the
// original weight in float64. With noise, tokens were picked by upper bound + noise, and nothing is
// proved. Valid until the next call.
struct Candidates {
  std::size_t count = 0;                  // M
  const std::int64_t* columns = nullptr;  // [N, M]
  const double* logits = nullptr;         // [N, M]
  const std::int64_t* proved = nullptr;   // [N], how many leading ones are in their true place
  const double* cut = nullptr;            // [N], no other token's logit (+ noise) is above it
  const double* error = nullptr;          // [N], how far a logit may be from the real number
};

// What the whole vocabulary was ranked by, for one row, [V] each.
struct QuantisedLogits {
  const float* logits = nullptr;
  const float* upper_bounds = nullptr;  // no exact logit is above it
};

using RowSpan = Span<std::size_t>;

class CandidateHead {
 public:
  virtual ~CandidateHead() = default;

  virtual bool certified() const = 0;
  virtual bool has_softcap() const = 0;  // its slope falls, so that bounds hold on one side only
  virtual std::size_t width() const = 0;
  // `noise` is [N, width], added to the upper bounds, or null.
  virtual Candidates pick(RowSpan rows, const float* noise) = 0;
  virtual QuantisedLogits quantised(std::size_t row) = 0;
  // All logits with the original weight, [N, width].
  virtual const float* full(RowSpan rows) = 0;
  // Quantised logits with the exact ones of the candidates written into them, [N, width].
  virtual const float* rescored(RowSpan rows) = 0;
};

}  // namespace headport::internal
