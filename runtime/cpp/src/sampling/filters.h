// What leaves the less likely tokens out of a draw: one row of a table per filter, in order.
#pragma once

#include <cstddef>

#include "sampling/scores.h"
#include "sampling/settings.h"

namespace headport::internal {

struct Filter {
  const char* name;
  bool (*acts)(const Sampling&);
  void (*keep)(Scores&, const Sampling&);  // leaves some of the scores, never none
};

// In the order of SAMPLING.md.
extern const Filter kFilters[];
extern const std::size_t kFilterCount;

bool filtering(const Sampling& sampling);  // whether any acts
// What all filters leave; T above 0. `but` is the name of one that has been applied already.
void keep(Scores& scores, const Sampling& sampling, const char* but = nullptr);
// The name of the first that acts, or null.
const char* first_filter(const Sampling& sampling);

// The k-th largest of some scores, K ≥ 1; k above K is K. `runs` are the largest of each run.
template <typename T>
double kth_largest(const T* scores, std::size_t size, std::size_t k, const std::vector<double>& runs,
                   std::vector<double>& heap);

}  // namespace headport::internal
