// Compiled for AVX2 and FMA; called only where the CPU has both.
#if defined(__x86_64__)
#include "avx2.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace headport::kernels {
namespace {

constexpr float kLargest = 32767.0F;
// Weights are read once, front to back. Hardware stops looking ahead at the end of each page, which
// costs half of the speed of memory; in bytes, far enough for its latency.
constexpr std::int64_t kAhead = 2048;

__m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// Sixteen of the whole numbers that two registers hold, the even ones or the odd ones of them.
template <int Which>
__m256i every_second(__m256i a, __m256i b) {
  const __m256 picked = _mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), Which);
  return _mm256_permute4x64_epi64(_mm256_castps_si256(picked), 0xD8);
}

template <int Which>
__m256i sixteen(const __m256i* whole) {
  const __m256i packed = _mm256_packs_epi32(every_second<Which>(whole[0], whole[1]),
                                            every_second<Which>(whole[2], whole[3]));
  return _mm256_permute4x64_epi64(packed, 0xD8);
}

void round_block(const float* x, const Form& form, std::int16_t* q, float* step,
                 std::int32_t* offset) {
  const __m256 sign = _mm256_set1_ps(-0.0F);
  __m256 largest = _mm256_setzero_ps();
  __m256 poison = _mm256_setzero_ps();  // 0 · x: NaN where x is not finite
  for (std::int64_t k = 0; k < form.block; k += 8) {
    const __m256 v = _mm256_loadu_ps(x + k);
    largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, v));
    poison = _mm256_fmadd_ps(v, _mm256_setzero_ps(), poison);
  }
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, largest);
  const float most = *std::max_element(lanes, lanes + 8);
  const bool finite = sum_of(poison) == 0.0F;
  const float inverse = kLargest / most;
  *step = finite ? most / kLargest : std::numeric_limits<float>::quiet_NaN();
  std::fill_n(offset, kParts, 0);
  if (!finite || !std::isfinite(inverse)) {
    std::fill_n(q, form.block, std::int16_t{0});
    return;
  }
  const __m256 factor = _mm256_set1_ps(inverse);
  __m256i sum = _mm256_setzero_si256();
  for (std::int64_t k = 0; k < form.block; k += kGroup) {
    __m256i whole[4];
    for (int i = 0; i < 4; ++i)
      whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + k + 8 * i), factor));
    for (const __m256i part : {sixteen<0x88>(whole), sixteen<0xDD>(whole)}) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), part);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
      q += kGroup / 2;
    }
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(offset),
                      _mm256_mullo_epi32(sum, _mm256_set1_epi32(-form.zero_point())));
}

void round(const Operands& o, std::int64_t from, std::int64_t to) {
  const Form& form = o.form;
  const std::int64_t blocks = form.blocks();
  float last[256];  // a block that K does not fill
  for (std::int64_t row = from; row < to; ++row)
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t first = b * form.block;
      const float* x = o.x + row * form.K + first;
      if (form.K - first < form.block) {
        std::fill_n(std::copy_n(x, form.K - first, last), form.block - (form.K - first), 0.0F);
        x = last;
      }
      round_block(x, form, o.rounded.q + row * form.padded() + first,
                  o.rounded.step + row * blocks + b, o.rounded.offset + (row * blocks + b) * kParts);
    }
}

struct Eight {
  static constexpr std::int64_t kBytes = 32;  // of a group
  static void unpack(const std::uint8_t* from, __m256i& even, __m256i& odd) {
    const __m256i both = load(from);
    even = _mm256_and_si256(both, _mm256_set1_epi16(255));
    odd = _mm256_srli_epi16(both, 8);
  }
};

struct Four {
  static constexpr std::int64_t kBytes = 16;
  static void unpack(const std::uint8_t* from, __m256i& even, __m256i& odd) {
    const __m256i both =
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    even = _mm256_and_si256(both, _mm256_set1_epi16(15));
    odd = _mm256_srli_epi16(both, 4);
  }
};

// W rows of the weight with X rows of x.
template <typename Bits, int W, int X>
inline void tile(const Operands& o, std::int64_t n, std::int64_t row) {
  const Form& form = o.form;
  const std::int64_t blocks = form.blocks();
  const std::int64_t padded = form.padded();
  const std::int64_t row_bytes = form.row_bytes();
  const std::uint8_t* weight = o.weight + n * row_bytes;
  const float* scale = o.scale + n * blocks;
  const std::int16_t* q = o.rounded.q + row * padded;
  const float* step = o.rounded.step + row * blocks;
  const std::int32_t* offset = o.rounded.offset + row * blocks * kParts;
  __m256 total[W][X];
  for (auto& of_row : total)
    for (auto& one : of_row) one = _mm256_setzero_ps();
  for (std::int64_t b = 0; b < blocks; ++b) {
    __m256i sum[W][X];
    for (int x = 0; x < X; ++x) {
      const __m256i start = load(offset + (x * blocks + b) * kParts);
      for (int w = 0; w < W; ++w) sum[w][x] = start;
    }
    for (std::int64_t k = 0; k < form.block; k += kGroup) {
      if constexpr (X == 1)
        _mm_prefetch(reinterpret_cast<const char*>(weight + kAhead), _MM_HINT_T0);
      for (int w = 0; w < W; ++w) {
        __m256i even;
        __m256i odd;
        Bits::unpack(weight + w * row_bytes, even, odd);
        for (int x = 0; x < X; ++x) {
          const __m256i products =
              _mm256_add_epi32(_mm256_madd_epi16(even, load(q + x * padded)),
                               _mm256_madd_epi16(odd, load(q + x * padded + kGroup / 2)));
          sum[w][x] = _mm256_add_epi32(sum[w][x], products);
        }
      }
      weight += Bits::kBytes;
      q += kGroup;
    }
    for (int w = 0; w < W; ++w)
      for (int x = 0; x < X; ++x) {
        const __m256 unit = _mm256_set1_ps(scale[w * blocks + b] * step[x * blocks + b]);
        total[w][x] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[w][x]), unit, total[w][x]);
      }
  }
  for (int w = 0; w < W; ++w)
    for (int x = 0; x < X; ++x) o.y[(row + x) * form.N + n + w] = sum_of(total[w][x]);
}

constexpr int kTall = 2;
constexpr int kWide = 3;

template <typename Bits>
void multiply_as(const Operands& o, std::int64_t from, std::int64_t to) {
  if (o.rows == 1) {  // one row of the weight at a time: memory likes one stream best
    for (std::int64_t n = from; n < to; ++n) tile<Bits, 1, 1>(o, n, 0);
    return;
  }
  std::int64_t row = 0;
  for (; row + kWide <= o.rows; row += kWide) {
    std::int64_t n = from;
    for (; n + kTall <= to; n += kTall) tile<Bits, kTall, kWide>(o, n, row);
    for (; n < to; ++n) tile<Bits, 1, kWide>(o, n, row);
  }
  for (; row < o.rows; ++row)
    for (std::int64_t n = from; n < to; ++n) tile<Bits, 1, 1>(o, n, row);
}

void multiply(const Operands& o, std::int64_t from, std::int64_t to) {
  if (o.form.bits == 8)
    multiply_as<Eight>(o, from, to);
  else
    multiply_as<Four>(o, from, to);
}

}  // namespace

const Kernel kAvx2{"AVX2", round, multiply, attend_avx2, normalise_avx2, gate_avx2};

}  // namespace headport::kernels
#endif
