// Compiled for AVX2 and FMA; called only where the CPU has both.
#if defined(__x86_64__)
#include "avx2.h"

#include <algorithm>
#include <limits>

namespace headport::kernels {
namespace {

constexpr std::int64_t kLanes = 8;
constexpr int kKeys = 4;   // at once
constexpr int kRegisters = 8;  // registers of an output at once

__m256 dot_parts(const float* query, const float* key, std::int64_t D) {
  __m256 sum = _mm256_setzero_ps();
  for (std::int64_t i = 0; i < D; i += kLanes)
    sum = _mm256_fmadd_ps(_mm256_loadu_ps(query + i), _mm256_loadu_ps(key + i), sum);
  return sum;
}

__m128 four_sums(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

void score(const Attended& a) {
  std::int64_t j = 0;
  for (; j + kKeys <= a.count; j += kKeys) {
    const float* key = a.keys + j * a.D;
    _mm_storeu_ps(a.scores + j, four_sums(dot_parts(a.query, key, a.D),
                                          dot_parts(a.query, key + a.D, a.D),
                                          dot_parts(a.query, key + 2 * a.D, a.D),
                                          dot_parts(a.query, key + 3 * a.D, a.D)));
  }
  for (; j < a.count; ++j) {
    const __m256 parts = dot_parts(a.query, a.keys + j * a.D, a.D);
    a.scores[j] = _mm_cvtss_f32(four_sums(parts, parts, parts, parts));
  }
}

// Scores become weights; their sum.
float weigh(const Attended& a) {
  const std::int64_t padded = (a.count + kLanes - 1) / kLanes * kLanes;
  std::fill(a.scores + a.count, a.scores + padded, -std::numeric_limits<float>::infinity());
  __m256 largest = _mm256_loadu_ps(a.scores);
  for (std::int64_t j = kLanes; j < padded; j += kLanes)
    largest = _mm256_max_ps(largest, _mm256_loadu_ps(a.scores + j));
  alignas(32) float lanes[kLanes];
  _mm256_store_ps(lanes, largest);
  const __m256 most = _mm256_set1_ps(*std::max_element(lanes, lanes + kLanes));
  __m256 sum = _mm256_setzero_ps();
  for (std::int64_t j = 0; j < padded; j += kLanes) {
    const __m256 weight = exp_of(_mm256_sub_ps(_mm256_loadu_ps(a.scores + j), most));
    _mm256_storeu_ps(a.scores + j, weight);
    sum = _mm256_add_ps(sum, weight);
  }
  return sum_of(sum);
}

template <int Parts>
void gather(const Attended& a, std::int64_t from, float factor) {
  __m256 sum[Parts];
  for (__m256& each : sum) each = _mm256_setzero_ps();
  for (std::int64_t j = 0; j < a.count; ++j) {
    const __m256 weight = _mm256_broadcast_ss(a.scores + j);
    const float* value = a.values + j * a.D + from;
    for (int i = 0; i < Parts; ++i)
      sum[i] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(value + i * kLanes), sum[i]);
  }
  for (int i = 0; i < Parts; ++i)
    _mm256_storeu_ps(a.out + from + i * kLanes, _mm256_mul_ps(sum[i], _mm256_set1_ps(factor)));
}

}  // namespace

void attend_avx2(const Attended& a) {
  if (a.D % kLanes != 0) return kPortable.attend(a);
  score(a);
  const float factor = 1.0F / weigh(a);
  std::int64_t from = 0;
  for (; from + kRegisters * kLanes <= a.D; from += kRegisters * kLanes) gather<kRegisters>(a, from, factor);
  for (; from < a.D; from += kLanes) gather<1>(a, from, factor);
}

}  // namespace headport::kernels
#endif
