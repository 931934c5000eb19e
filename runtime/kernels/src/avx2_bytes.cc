// Weights of 4 bits with activations of 8. Compiled for AVX2 and FMA; called only where the CPU has both.
#if defined(__x86_64__)
#include "avx2.h"

#include <algorithm>

namespace headport::kernels {
namespace {

constexpr float kLargest = 127.0F;
constexpr std::int64_t kAhead = 4096;  // bytes; see avx2.cc
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

struct Four {
  __m256i even;
  __m256i odd;

  explicit Four(__m256i both)
      : even(_mm256_and_si256(both, _mm256_set1_epi8(15))),
        odd(_mm256_and_si256(_mm256_srli_epi16(both, 4), _mm256_set1_epi8(15))) {}

  // 64 products, of which sixteen sums of four fit into 16 bits: 4 · 15 · 127 = 7,620. So do those
  // of four groups: what begins with the offset is never larger than 8 · 127 · 16 in the end.
  __m256i add(__m256i sum, const std::int8_t* q) const {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(odd, load(q + kHalf)));
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(even, load(q)));
  }
};

// What a whole sum is worth. Blocks of 32 come in twos, each in a half of the register.
template <int Block>
__m256 unit(const float* scale, const float* step) {
  if constexpr (Block > 32)
    return _mm256_mul_ps(_mm256_broadcast_ss(scale), _mm256_broadcast_ss(step));
  const auto two = [](const float* from) {
    return _mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  };
  const __m128 product = _mm_mul_ps(two(scale), two(step));
  return _mm256_set_m128(_mm_shuffle_ps(product, product, 0x55), _mm_shuffle_ps(product, product, 0));
}

__m256 widened(__m256i sum) {
  return _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
}

// One row of the weight with X rows of x.
template <int Block, int X>
void tile(const Operands& o, std::int64_t n, std::int64_t row) {
  constexpr std::int64_t groups = Block <= kByteGroup ? 1 : Block / kByteGroup;
  constexpr std::int64_t together = Block < kByteGroup ? 2 : 1;  // blocks in a sum
  const Form& form = o.form;
  const std::int64_t blocks = form.blocks();
  const std::int64_t padded = RoundedBytes::padded(form);
  const std::int64_t sums = RoundedBytes::sums(form);
  const std::uint8_t* weight = o.weight + n * form.row_bytes();
  const float* scale = o.scale + n * blocks;
  const std::int8_t* q = o.bytes.q + row * padded;
  const float* step = o.bytes.step + row * blocks;
  const std::int16_t* offset = o.bytes.offset + row * sums * kByteParts;
  __m256 total[X];
  for (__m256& one : total) one = _mm256_setzero_ps();
  for (std::int64_t b = 0; b + together <= blocks; b += together) {
    __m256i sum[X];
    for (int x = 0; x < X; ++x) sum[x] = load(offset + x * sums * kByteParts);
    for (std::int64_t g = 0; g < groups; ++g) {
      if constexpr (X == 1)
        _mm_prefetch(reinterpret_cast<const char*>(weight + kAhead), _MM_HINT_T0);
      const Four four(load(weight));
      for (int x = 0; x < X; ++x) sum[x] = four.add(sum[x], q + x * padded);
      weight += kHalf;
      q += kByteGroup;
    }
    for (int x = 0; x < X; ++x)
      total[x] = _mm256_fmadd_ps(widened(sum[x]), unit<Block>(scale + b, step + x * blocks + b), total[x]);
    offset += kByteParts;
  }
  if (blocks % together != 0) {  // one of 32 is left: its group's other half is zero
    const Four four(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weight))));
    for (int x = 0; x < X; ++x) {
      const __m256 one = _mm256_mul_ps(_mm256_broadcast_ss(scale + blocks - 1),
                                       _mm256_broadcast_ss(step + (x + 1) * blocks - 1));
      const __m256i sum = four.add(load(offset + x * sums * kByteParts), q + x * padded);
      total[x] = _mm256_fmadd_ps(widened(sum), one, total[x]);
    }
  }
  for (int x = 0; x < X; ++x) o.y[(row + x) * form.N + n] = sum_of(total[x]);
}

// As many rows of x at once as there are left; weights are unpacked once for all of them.
template <int Block, int X>
void multiply_rows(const Operands& o, std::int64_t from, std::int64_t to, std::int64_t& row) {
  for (; row + X <= o.rows; row += X)
    for (std::int64_t n = from; n < to; ++n) tile<Block, X>(o, n, row);
}

template <int Block>
void multiply_as(const Operands& o, std::int64_t from, std::int64_t to) {
  std::int64_t row = 0;
  multiply_rows<Block, 6>(o, from, to, row);
  multiply_rows<Block, 3>(o, from, to, row);
  multiply_rows<Block, 1>(o, from, to, row);
}

}  // namespace

void round_bytes_avx2(const Operands& o, std::int64_t from, std::int64_t to) {
  const Form& form = o.form;
  const std::int64_t padded = RoundedBytes::padded(form);
  const std::int64_t sums = RoundedBytes::sums(form);
  const std::int64_t of_sum = padded / sums;  // activations
  for (std::int64_t row = from; row < to; ++row) {
    std::int8_t* q = o.bytes.q + row * padded;
    std::int16_t* offset = o.bytes.offset + row * sums * kByteParts;
    std::fill_n(q + padded - kByteGroup, kByteGroup, std::int8_t{0});
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
  switch (o.form.block) {
    case 32: return multiply_as<32>(o, from, to);
    case 64: return multiply_as<64>(o, from, to);
    case 128: return multiply_as<128>(o, from, to);
    default: return multiply_as<256>(o, from, to);
  }
}

}  // namespace headport::kernels
#endif
