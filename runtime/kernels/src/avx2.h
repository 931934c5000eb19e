// What the files that are compiled for AVX2 and FMA share.
#pragma once

#include <immintrin.h>

#include "product.h"

namespace headport::kernels {

inline float sum_of(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

void attend_avx2(const Attended& a);

}  // namespace headport::kernels
