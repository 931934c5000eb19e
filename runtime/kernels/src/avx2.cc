// Compiled for AVX2 and FMA; called only where the CPU has both.
#if defined(__x86_64__)
#include "avx2_tile.h"

#include <algorithm>

namespace headport::kernels {
namespace {

constexpr float kLargest = 32767.0F;

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

// Activations of 16 bits with a group's weights, the even ones and the odd ones.
struct Words {
  static constexpr std::int64_t kGroup = kernels::kGroup;
  static constexpr std::int64_t kParts = kernels::kParts;
  // Weights are read once, front to back. Hardware stops looking ahead at the end of each page,
  // which costs half of the speed of memory; in bytes, far enough for its latency.
  static constexpr std::int64_t kAhead = 2048;

  __m256i even;
  __m256i odd;

  static View<std::int16_t, std::int32_t> view(const Operands& o) {
    const Form& form = o.form;
    return {o.weight, o.scale, o.rounded.q, o.rounded.step, o.rounded.offset, o.y,
            form.row_bytes(), form.blocks(), form.padded(), form.blocks() * kParts, form.N};
  }
  __m256i add(__m256i sum, const std::int16_t* q) const {
    const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(even, load(q)),
                                              _mm256_madd_epi16(odd, load(q + kGroup / 2)));
    return _mm256_add_epi32(sum, products);
  }
  static __m256 whole(__m256i sum) { return _mm256_cvtepi32_ps(sum); }
};

struct Eight : Words {
  static constexpr std::int64_t kBytes = 32;
  explicit Eight(const std::uint8_t* from) {
    const __m256i both = load(from);
    even = _mm256_and_si256(both, _mm256_set1_epi16(255));
    odd = _mm256_srli_epi16(both, 8);
  }
};

struct Four : Words {
  static constexpr std::int64_t kBytes = 16;
  explicit Four(const std::uint8_t* from) {
    const __m256i both =
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    even = _mm256_and_si256(both, _mm256_set1_epi16(15));
    odd = _mm256_srli_epi16(both, 4);
  }
};

void multiply(const Operands& o, std::int64_t from, std::int64_t to) {
  if (o.form.bits == 8)
    multiply_as<Eight, 4, 2, 1>(o, from, to);
  else
    multiply_as<Four, 4, 2, 1>(o, from, to);
}

}  // namespace

const Kernel kAvx2{"AVX2",
                   {round, multiply},
                   {round_bytes_avx2, multiply_bytes_avx2},
                   attend_avx2,
                   normalise_avx2,
                   gate_avx2,
                   {next_above_avx2, largest_avx2, exp_sum_avx2, dot_avx2}};

}  // namespace headport::kernels
#endif
