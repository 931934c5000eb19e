// What the files that are compiled for AVX2 and FMA share.
#pragma once

#include <immintrin.h>

#include <initializer_list>

#include "product.h"

namespace headport::kernels {

inline float sum_of(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// exp(x) for x up to 0, within 2e-7 of itself; what is below -87 counts as -87, which is 2e-38.
// x = n ln 2 + r with |r| up to ln 2 / 2, and exp(r) by its series: r^8 / 8! is 5e-9.
inline __m256 exp_of(__m256 x) {
  x = _mm256_max_ps(_mm256_set1_ps(-87.0F), x);  // in this order NaN stays NaN
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504F)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375F), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4F), r);
  __m256 y = _mm256_set1_ps(1.0F / 5040);
  for (const float next : {1.0F / 720, 1.0F / 120, 1.0F / 24, 1.0F / 6, 0.5F, 1.0F, 1.0F})
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(next));
  const __m256i power =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(y, _mm256_castsi256_ps(power));
}

void attend_avx2(const Attended& a);
void normalise_avx2(const Normalised& n);
void gate_avx2(const Gated& g);

}  // namespace headport::kernels
