// Passes over a whole row, written so that compilers turn them into vector instructions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace headport::internal {

// Whether no number is NaN or infinite.
inline bool all_finite(const float* values, std::size_t size) {
  std::int32_t odd = 0;
  for (std::size_t n = 0; n < size; ++n) {
    std::int32_t bits = 0;
    std::memcpy(&bits, values + n, sizeof bits);
    odd |= (bits & 0x7fffffff) >= 0x7f800000 ? 1 : 0;
  }
  return odd == 0;
}

// The largest of some numbers, none of them NaN.
template <typename T>
T largest(const T* values, std::size_t size) {
  constexpr std::size_t kLanes = 16;
  if (size < kLanes) return *std::max_element(values, values + size);
  T best[kLanes];
  std::copy(values, values + kLanes, best);
  std::size_t n = kLanes;
  for (; n + kLanes <= size; n += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      best[lane] = best[lane] < values[n + lane] ? values[n + lane] : best[lane];
    }
  }
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) {
      best[lane] = best[lane] < best[lane + half] ? best[lane + half] : best[lane];
    }
  }
  T found = best[0];
  for (; n < size; ++n) found = std::max(found, values[n]);
  return found;
}

// Numbers that stand together; passes leave a run out whose largest says enough.
constexpr std::size_t kRun = 64;

// The largest of each run, none NaN; the last run may be shorter.
template <typename T>
void largest_of_runs(const T* values, std::size_t size, std::vector<double>& found) {
  found.clear();
  for (std::size_t first = 0; first < size; first += kRun) {
    found.push_back(static_cast<double>(largest(values + first, std::min(kRun, size - first))));
  }
}

// The place of the largest, of equal ones the first.
template <typename T>
std::size_t argmax(const T* values, std::size_t size) {
  const T best = largest(values, size);
  return static_cast<std::size_t>(std::find(values, values + size, best) - values);
}

// Visits the places of all numbers from `least` up, in order. `least` may rise as `visit` goes on.
template <typename T, typename Visit>
void for_each_from(const T* values, std::size_t size, const T& least, Visit visit) {
  constexpr std::size_t kLanes = 16;
  std::size_t n = 0;
  for (; n + kLanes <= size; n += kLanes) {
    int any = 0;
    for (std::size_t lane = 0; lane < kLanes; ++lane) any |= values[n + lane] >= least ? 1 : 0;
    if (any == 0) continue;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      if (values[n + lane] >= least) visit(n + lane);
    }
  }
  for (; n < size; ++n) {
    if (values[n] >= least) visit(n);
  }
}

// As above, where the largest of each run are known.
template <typename T, typename Visit>
void for_each_from(const T* values, std::size_t size, const std::vector<double>& runs,
                   const T& least, Visit visit) {
  for (std::size_t run = 0; run < runs.size(); ++run) {
    if (runs[run] < static_cast<double>(least)) continue;
    const std::size_t first = run * kRun;
    for_each_from(values + first, std::min(kRun, size - first), least,
                  [&](std::size_t n) { visit(first + n); });
  }
}

}  // namespace headport::internal
