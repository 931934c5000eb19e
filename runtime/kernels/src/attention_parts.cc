#include "attention_parts.h"

#include <algorithm>
#include <cmath>

namespace headport::kernels {

void fold(const Partial& found, const Partial& next, std::int64_t queries, std::int64_t D) {
  for (std::int64_t q = 0; q < queries; ++q) {
    const float most = std::max(found.most[q], next.most[q]);
    const float before = std::exp(found.most[q] - most);
    const float after = std::exp(next.most[q] - most);
    float* out = found.out + q * D;
    const float* more = next.out + q * D;
    for (std::int64_t i = 0; i < D; ++i) out[i] = before * out[i] + after * more[i];
    found.sum[q] = before * found.sum[q] + after * next.sum[q];
    found.most[q] = most;
  }
}

void finish(const Partial& found, std::int64_t queries, std::int64_t D) {
  for (std::int64_t q = 0; q < queries; ++q) {
    const float factor = 1.0F / found.sum[q];
    for (std::int64_t i = 0; i < D; ++i) found.out[q * D + i] *= factor;
  }
}

}  // namespace headport::kernels
