// Whether a kernel computes what the plain one does, on this CPU.
#pragma once

#include <string>

#include "product.h"

namespace headport::kernels {

// Empty, or what differs. Every width and block, one row and several, full and partly filled blocks;
// takes some two milliseconds.
std::string find_fault(const Kernel& kernel);

}  // namespace headport::kernels
