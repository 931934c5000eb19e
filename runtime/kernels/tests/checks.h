// What the parts of the kernels' own test share.
#pragma once

#include <cstdint>
#include <cstdio>
#include <vector>

inline int failures = 0;

inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  ++failures;
}

// The same numbers each time.
struct Random {
  std::uint32_t state = 7;
  std::uint32_t next() { return state = state * 1664525U + 1013904223U; }
  float real() { return static_cast<float>(next() >> 8) / 8388608.0F - 1.0F; }  // from -1 to 1
};

inline std::vector<float> random_values(std::int64_t count) {
  Random random;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = random.real();
  return values;
}

void check_products();
void check_attention();
void check_around();
void check_faults_are_found();
