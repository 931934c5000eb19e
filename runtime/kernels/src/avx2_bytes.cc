// Weights of 4 bits with activations of 8. Compiled for AVX2 and FMA; called only where the CPU has
// both.
#if defined(__x86_64__)
#include "avx2_tile.h"

#include <algorithm>

namespace headport::kernels {
namespace {

constexpr float kLargest = 127.0F;
constexpr std::int64_t kHalf = kByteGroup / 2;

// 32 activations, of which the even ones and the odd ones go to the same half of their group.
void round_chunk(const float* x, float inverse, int zero_point, std::int8_t* q,
                 std::int16_t* offset) {
  const __m256 factor = _mm256_set1_ps(inverse);
  __m256i whole[4];
  for (int i = 0; i < 4; ++i)
    whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), factor));
  const __m256i even = sixteen<kEven>(whole);
  const __m256i odd = sixteen<kOdd>(whole);
  const auto store = [](__m256i part, std::int8_t* to) {
    const __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(part), _mm256_extracti128_si256(part, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
  };
  store(even, q);
  store(odd, q + kHalf);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(even, ones), _mm256_madd_epi16(odd, ones));
  sum = _mm256_mullo_epi32(sum, _mm256_set1_epi32(-zero_point));
  const __m128i eight =
      _mm_packs_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  auto* to = reinterpret_cast<__m128i*>(offset);
  _mm_storeu_si128(to, _mm_add_epi16(_mm_loadu_si128(to), eight));
}

struct Bytes {
  static constexpr std::int64_t kGroup = kByteGroup;
  static constexpr std::int64_t kBytes = kByteGroup / 2;
  static constexpr std::int64_t kParts = kByteParts;
  static constexpr std::int64_t kAhead = 4096;

  __m256i even;
  __m256i odd;

  explicit Bytes(__m256i both)
      : even(_mm256_and_si256(both, _mm256_set1_epi8(15))),
        odd(_mm256_and_si256(_mm256_srli_epi16(both, 4), _mm256_set1_epi8(15))) {}
  explicit Bytes(const std::uint8_t* from) : Bytes(load(from)) {}
  Bytes(const std::uint8_t* from, HalfOfGroup)
      : Bytes(_mm256_inserti128_si256(
            _mm256_setzero_si256(), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), 0)) {}

  static View<std::int8_t, std::int16_t> view(const Operands& o) {
    const Form& form = o.form;
    return {o.weight, o.scale, o.bytes.q, o.bytes.step, o.bytes.offset, o.y,
            form.row_bytes(), form.blocks(), RoundedBytes::padded(form),
            RoundedBytes::sums(form) * kParts, form.N};
  }
  // 64 products, of which sixteen sums of four fit into 16 bits: 4 · 15 · 127 = 7,620. So do those
  // of four groups: what begins with the offset is never larger than 8 · 127 · 16 in the end.
  __m256i add(__m256i sum, const std::int8_t* q) const {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(odd, load(q + kHalf)));
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(even, load(q)));
  }
  static __m256 whole(__m256i sum) {
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
  }
};

}  // namespace

void round_bytes_avx2(const Operands& o, std::int64_t from, std::int64_t to) {
  const Form& form = o.form;
  const std::int64_t padded = RoundedBytes::padded(form);
  const std::int64_t sums = RoundedBytes::sums(form);
  const std::int64_t of_sum = padded / sums;  // activations
  for (std::int64_t row = from; row < to; ++row) {
    std::int8_t* q = o.bytes.q + row * padded;
    std::int16_t* offset = o.bytes.offset + row * sums * kByteParts;
    std::fill_n(q + padded - kByteGroup, kByteGroup, std::int8_t{0});  // a half may stay unused
    std::fill_n(offset, sums * kByteParts, std::int16_t{0});
    for_blocks(form, o.x + row * form.K, [&](const float* x, std::int64_t b) {
      const Step found = find_step(x, form.block, kLargest);
      o.bytes.step[row * form.blocks() + b] = found.step;
      for (std::int64_t k = 0; k < form.block; k += kGroup) {
        const std::int64_t at = b * form.block + k;
        const std::int64_t half = at % kByteGroup / 2;
        round_chunk(x + k, found.inverse, form.zero_point(), q + at - at % kByteGroup + half,
                    offset + at / of_sum * kByteParts + half / 2);
      }
    });
  }
}

void multiply_bytes_avx2(const Operands& o, std::int64_t from, std::int64_t to) {
  multiply_as<Bytes, 6, 3, 1>(o, from, to);
}

}  // namespace headport::kernels
#endif
