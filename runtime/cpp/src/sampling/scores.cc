#include "sampling/scores.h"

#include <algorithm>
#include <cmath>

namespace headport::internal {

void Scores::reserve(std::size_t columns) {
  for (auto* each : {&values, &sorted, &log_p, &heap, &runs}) each->reserve(columns);
  ids.reserve(columns);
  order.reserve(columns);
  buckets.reserve(columns);
}

void Scores::clear() {
  values.clear();
  ids.clear();
}

double Scores::largest() const { return *std::max_element(values.begin(), values.end()); }

void log_softmax(const std::vector<double>& values, double largest, double temperature,
                 std::vector<double>& log_p) {
  log_p.clear();
  double total = 0.0;
  for (const double value : values) {
    const double s = scaled(value, largest, temperature);
    log_p.push_back(s);
    total += std::exp(s);
  }
  const double shift = std::log(total);
  for (double& s : log_p) s -= shift;
}

}  // namespace headport::internal
