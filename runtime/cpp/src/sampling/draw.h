// The draw: argmax of s + g, of equal sums the lowest id.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sampling/noise.h"

namespace headport::internal {

// Draws from a whole row; column v is id v. Gives the column.
std::size_t draw_from_row(const float* logits, std::size_t size, double temperature,
                          const NoiseKey& key);

// Draws from some scores, all finite, of ascending ids. Gives the position.
std::size_t draw_from(const double* scores, const std::int64_t* ids, std::size_t size,
                      double temperature, const NoiseKey& key);

}  // namespace headport::internal
