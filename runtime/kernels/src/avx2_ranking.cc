// Passes over a whole vocabulary. Compiled for AVX2 and FMA; called only where the CPU has both.
#if defined(__x86_64__)
#include "avx2.h"

namespace headport::kernels {
namespace {

constexpr std::int64_t kLanes = 8;

// Lanes whose key is above, or is no number.
template <int Stride>
int above(const Keys& keys, std::int64_t v, __m256 noise, __m256 threshold) {
  if constexpr (Stride == 1) noise = _mm256_loadu_ps(keys.noise + v);
  const __m256 key = _mm256_add_ps(_mm256_loadu_ps(keys.upper + v), noise);
  return _mm256_movemask_ps(_mm256_cmp_ps(key, threshold, _CMP_NLE_UQ));
}

template <int Stride>
std::int64_t find_above(const Keys& keys, std::int64_t from, std::int64_t to, float threshold) {
  const __m256 limit = _mm256_set1_ps(threshold);
  const __m256 noise = _mm256_set1_ps(keys.noise[0]);
  std::int64_t v = from;
  for (; v + kLanes <= to; v += kLanes)
    if (const int found = above<Stride>(keys, v, noise, limit); found != 0)
      return v + __builtin_ctz(static_cast<unsigned>(found));
  while (v < to && keys.at(v) <= threshold) ++v;
  return v;
}

}  // namespace

std::int64_t next_above_avx2(const Keys& keys, std::int64_t from, std::int64_t to, float threshold) {
  return keys.stride == 0 ? find_above<0>(keys, from, to, threshold)
                          : find_above<1>(keys, from, to, threshold);
}

float largest_avx2(const float* values, std::int64_t count) {
  __m256 most = _mm256_set1_ps(values[0]);
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) most = _mm256_max_ps(most, _mm256_loadu_ps(values + i));
  alignas(32) float lanes[kLanes];
  _mm256_store_ps(lanes, most);
  float found = *std::max_element(lanes, lanes + kLanes);
  for (; i < count; ++i) found = std::max(found, values[i]);
  return found;
}

float exp_sum_avx2(const float* values, std::int64_t count, float shift) {
  const __m256 shifts = _mm256_set1_ps(shift);
  __m256 total = _mm256_setzero_ps();
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    total = _mm256_add_ps(total, exp_of(_mm256_sub_ps(_mm256_loadu_ps(values + i), shifts)));
  if (i < count) {
    alignas(32) float rest[kLanes] = {};
    for (std::int64_t k = i; k < count; ++k) rest[k - i] = values[k] - shift;
    _mm256_store_ps(rest, exp_of(_mm256_load_ps(rest)));
    std::fill(rest + (count - i), rest + kLanes, 0.0F);
    total = _mm256_add_ps(total, _mm256_load_ps(rest));
  }
  return sum_of(total);
}

double dot_avx2(const float* weight, const double* x, std::int64_t count) {
  __m256d low = _mm256_setzero_pd();
  __m256d high = _mm256_setzero_pd();
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    low = _mm256_fmadd_pd(_mm256_cvtps_pd(_mm_loadu_ps(weight + i)), _mm256_loadu_pd(x + i), low);
    high = _mm256_fmadd_pd(_mm256_cvtps_pd(_mm_loadu_ps(weight + i + 4)), _mm256_loadu_pd(x + i + 4),
                           high);
  }
  alignas(32) double lanes[4];
  _mm256_store_pd(lanes, _mm256_add_pd(low, high));
  double total = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  for (; i < count; ++i) total += double{weight[i]} * x[i];
  return total;
}

}  // namespace headport::kernels
#endif
