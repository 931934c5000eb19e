// What processors left of a row: scores above -inf and the ids they belong to, ascending.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling/settings.h"

namespace headport::internal {

struct Scores {
  std::vector<double> values;      // [K]
  std::vector<std::int64_t> ids;   // [K]
  std::vector<double> sorted;      // memory of the filters, [≤ K]
  std::vector<double> log_p;
  std::vector<std::size_t> order;
  std::vector<double> heap;
  std::vector<double> runs;  // the largest of each run of a row
  std::vector<std::uint16_t> buckets;

  std::size_t size() const { return values.size(); }
  void reserve(std::size_t columns);
  void clear();
  void add(double value, std::int64_t id) {
    values.push_back(value);
    ids.push_back(id);
  }
  double largest() const;
};

// (y - max y) / T: 0 for the largest, never an overflow.
inline double scaled(double value, double largest, double temperature) {
  return (value - largest) / temperature;
}

// s - ln Σ exp(s), summed in ascending position, into `log_p`.
void log_softmax(const std::vector<double>& values, double largest, double temperature,
                 std::vector<double>& log_p);

}  // namespace headport::internal
