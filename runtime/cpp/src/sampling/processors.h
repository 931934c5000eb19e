// What changes scores before a token is chosen: one row of a table per rule, in order.
#pragma once

#include <cstddef>

#include "sampling/rules.h"

namespace headport::internal {

struct Processor {
  const char* name;
  bool (*acts)(const Sampling&);
  void (*apply)(Row&);
};

// In the order of SAMPLING.md.
extern const Processor kProcessors[];
extern const std::size_t kProcessorCount;

bool processing(const Sampling& sampling);  // whether any acts
void apply_processors(Row& row);            // all that act, in order

}  // namespace headport::internal
