// Compiled for AVX2 and FMA; called only where the CPU has both.
#if defined(__x86_64__)
#include "avx2.h"

#include <algorithm>

namespace headport::kernels {
namespace {

constexpr float kLargest = 32767.0F;
// Weights are read once, front to back. Hardware stops looking ahead at the end of each page, which
// costs half of the speed of memory; in bytes, far enough for its latency.
constexpr std::int64_t kAhead = 2048;

void round_block(const float* x, const Form& form, std::int16_t* q, float* step,
                 std::int32_t* offset) {
  const Step found = find_step(x, form.block, kLargest);
  *step = found.step;
  std::fill_n(offset, kParts, 0);
  if (found.inverse == 0.0F) {
    std::fill_n(q, form.block, std::int16_t{0});
    return;
  }
  const __m256 factor = _mm256_set1_ps(found.inverse);
  __m256i sum = _mm256_setzero_si256();
  for (std::int64_t k = 0; k < form.block; k += kGroup) {
    __m256i whole[4];
    for (int i = 0; i < 4; ++i)
      whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + k + 8 * i), factor));
    for (const __m256i part : {sixteen<kEven>(whole), sixteen<kOdd>(whole)}) {
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
  for (std::int64_t row = from; row < to; ++row)
    for_blocks(form, o.x + row * form.K, [&](const float* x, std::int64_t b) {
      const std::int64_t at = row * form.blocks() + b;
      round_block(x, form, o.rounded.q + at * form.block, o.rounded.step + at,
                  o.rounded.offset + at * kParts);
    });
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

const Kernel kAvx2{"AVX2",
                   {round, multiply},
                   {round_bytes_avx2, multiply_bytes_avx2},
                   attend_avx2,
                   normalise_avx2,
                   gate_avx2};

}  // namespace headport::kernels
#endif
