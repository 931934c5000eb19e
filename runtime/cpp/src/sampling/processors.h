// What changes scores before a token is chosen: one row of a table per rule, in order.
#pragma once

#include <cstddef>
#include <functional>

#include "sampling/rules.h"

namespace headport::internal {

using Visit = std::function<void(std::int64_t id)>;

struct Processor {
  const char* name;
  bool (*acts)(const Sampling&);
  void (*apply)(Row&);
  // Visits the ids that it may lift above the score they had; null where there are none.
  void (*lifts)(const Sampling&, const Context&, const Visit&) = nullptr;
};

// In the order of SAMPLING.md.
extern const Processor kProcessors[];
extern const std::size_t kProcessorCount;

bool processing(const Sampling& sampling);  // whether any acts
void apply_processors(Row& row);            // all that act, in order
// Ids that one of them may lift, some more than once.
void lift(const Sampling& sampling, const Context& context, const Visit& visit);

}  // namespace headport::internal
