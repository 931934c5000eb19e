// Whether a kernel computes what the plain one does, on this CPU.
#pragma once

#include <string>

#include "product.h"

namespace headport::kernels {

// Empty, or what differs. Every width and block, one row and several, full and partly filled blocks;
// takes some five milliseconds.
std::string find_fault(const Kernel& kernel);

// The part of it that runs attention as the operator does, with what threads share.
std::string find_operator_fault(const Kernel& kernel);

// The part of it that ranks candidates.
std::string find_candidates_fault(const Kernel& kernel);

}  // namespace headport::kernels
