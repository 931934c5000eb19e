// Top-p of a whole row without sorting it.
#pragma once

#include <cstddef>

#include "sampling/columns.h"
#include "sampling/scores.h"

namespace headport::internal {

// Leaves in `kept` what top-p keeps of a row of finite scores, or scores that are -inf where they
// are banned. False where that hangs on the rounding of a sum, so that only adding up in the stated
// order can tell; `kept` then holds nothing of use.
template <typename T>
bool nucleus(const T* scores, std::size_t size, const Columns& columns, double temperature, double p,
             Scores& kept);

}  // namespace headport::internal
