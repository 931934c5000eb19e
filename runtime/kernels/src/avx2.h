// What the files that are compiled for AVX2 and FMA share.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

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

inline __m256i load(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

// Sixteen of the whole numbers that two registers hold, the even ones or the odd ones of them.
template <int Which>
__m256i every_second(__m256i a, __m256i b) {
  const __m256 picked = _mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), Which);
  return _mm256_permute4x64_epi64(_mm256_castps_si256(picked), 0xD8);
}

constexpr int kEven = 0x88;
constexpr int kOdd = 0xDD;

// Those of four registers, as 16 bits.
template <int Which>
__m256i sixteen(const __m256i* whole) {
  const __m256i packed = _mm256_packs_epi32(every_second<Which>(whole[0], whole[1]),
                                            every_second<Which>(whole[2], whole[3]));
  return _mm256_permute4x64_epi64(packed, 0xD8);
}

// What a block's activations are multiplied by to be whole, and what a whole one is worth.
struct Step {
  float inverse;  // 0: the block counts as zeros
  float step;     // NaN where an activation is not finite
};

inline Step find_step(const float* x, std::int64_t block, float largest_whole) {
  const __m256 sign = _mm256_set1_ps(-0.0F);
  __m256 largest = _mm256_setzero_ps();
  __m256 poison = _mm256_setzero_ps();  // 0 · x: NaN where x is not finite
  for (std::int64_t k = 0; k < block; k += 8) {
    const __m256 v = _mm256_loadu_ps(x + k);
    largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, v));
    poison = _mm256_fmadd_ps(v, _mm256_setzero_ps(), poison);
  }
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, largest);
  const float most = *std::max_element(lanes, lanes + 8);
  if (sum_of(poison) != 0.0F) return {0.0F, std::numeric_limits<float>::quiet_NaN()};
  const float inverse = largest_whole / most;
  return {std::isfinite(inverse) ? inverse : 0.0F, most / largest_whole};
}

// Calls work(x, b) for each block b of a row of x, the last one filled up with zeros.
template <typename Work>
void for_blocks(const Form& form, const float* row, Work&& work) {
  float last[256];
  for (std::int64_t b = 0; b < form.blocks(); ++b) {
    const std::int64_t left = form.K - b * form.block;
    const float* x = row + b * form.block;
    if (left < form.block) {
      std::fill_n(std::copy_n(x, left, last), form.block - left, 0.0F);
      x = last;
    }
    work(x, b);
  }
}

void round_bytes_avx2(const Operands& o, std::int64_t from, std::int64_t to);
void multiply_bytes_avx2(const Operands& o, std::int64_t from, std::int64_t to);
void attend_avx2(const Attended& a);
void normalise_avx2(const Normalised& n);
void gate_avx2(const Gated& g);
std::int64_t next_above_avx2(const Keys& keys, std::int64_t from, std::int64_t to, float threshold);
float largest_avx2(const float* values, std::int64_t count);
float exp_sum_avx2(const float* values, std::int64_t count, float shift);
double dot_avx2(const float* weight, const double* x, std::int64_t count);

}  // namespace headport::kernels
