// A product of weights and rounded activations, whatever their bits. Compiled for AVX2 and FMA.
#pragma once

#include "avx2.h"

namespace headport::kernels {

// Rows of x as a way of adding up reads them.
template <typename Whole, typename Offset>
struct Rows {
  const Whole* q;
  std::int64_t padded;  // activations of a row
  const float* step;
  const Offset* offset;
  std::int64_t offsets;  // of a row
};

struct HalfOfGroup {};
constexpr HalfOfGroup kHalfOfGroup;

// What a whole sum is worth. Two blocks in one sum have each a half of the register.
template <int Together>
__m256 unit(const float* scale, const float* step) {
  if constexpr (Together == 1)
    return _mm256_mul_ps(_mm256_broadcast_ss(scale), _mm256_broadcast_ss(step));
  const auto two = [](const float* from) {
    return _mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  };
  const __m128 product = _mm_mul_ps(two(scale), two(step));
  return _mm256_set_m128(_mm_shuffle_ps(product, product, 0x55),
                         _mm_shuffle_ps(product, product, 0));
}

// One row of the weight with X rows of x. A Way has
//     kGroup, kBytes      weights that it unpacks at once, and their bytes
//     kParts, kAhead      of an offset; how far ahead memory is asked for
//     rows(o, row)        Rows from this one on
//     Way(bytes)          unpacked weights
//     add(sum, q)         the sum and a group's products
//     whole(sum)          as float32
template <typename Way, int Block, int X>
void tile(const Operands& o, std::int64_t n, std::int64_t row) {
  constexpr std::int64_t together = Block < Way::kGroup ? 2 : 1;  // blocks in a sum
  constexpr std::int64_t groups = Block * together / Way::kGroup;
  const Form& form = o.form;
  const std::int64_t blocks = form.blocks();
  const std::uint8_t* weight = o.weight + n * form.row_bytes();
  const float* scale = o.scale + n * blocks;
  auto rows = Way::rows(o, row);
  __m256 total[X];
  for (__m256& one : total) one = _mm256_setzero_ps();
  for (std::int64_t b = 0; b + together <= blocks; b += together) {
    __m256i sum[X];
    for (int x = 0; x < X; ++x) sum[x] = load(rows.offset + x * rows.offsets);
    for (std::int64_t g = 0; g < groups; ++g) {
      if constexpr (X == 1)
        _mm_prefetch(reinterpret_cast<const char*>(weight + Way::kAhead), _MM_HINT_T0);
      const Way unpacked(weight);
      for (int x = 0; x < X; ++x) sum[x] = unpacked.add(sum[x], rows.q + x * rows.padded);
      weight += Way::kBytes;
      rows.q += Way::kGroup;
    }
    for (int x = 0; x < X; ++x)
      total[x] = _mm256_fmadd_ps(
          Way::whole(sum[x]), unit<together>(scale + b, rows.step + x * blocks + b), total[x]);
    rows.offset += Way::kParts;
  }
  if constexpr (together == 2)
    if (blocks % 2 != 0) {  // the other half of the last group is zero
      const Way unpacked(weight, kHalfOfGroup);
      for (int x = 0; x < X; ++x) {
        const __m256i start = load(rows.offset + x * rows.offsets);
        const __m256i sum = unpacked.add(start, rows.q + x * rows.padded);
        const __m256 worth = unit<1>(scale + blocks - 1, rows.step + (x + 1) * blocks - 1);
        total[x] = _mm256_fmadd_ps(Way::whole(sum), worth, total[x]);
      }
    }
  for (int x = 0; x < X; ++x) o.y[(row + x) * form.N + n] = sum_of(total[x]);
}

// So many rows of x at once while there are as many: weights are unpacked once for all of them.
template <typename Way, int Block, int X>
void multiply_rows(const Operands& o, std::int64_t from, std::int64_t to, std::int64_t& row) {
  for (; row + X <= o.rows; row += X)
    for (std::int64_t n = from; n < to; ++n) tile<Way, Block, X>(o, n, row);
}

template <typename Way, int Block, int... X>
void multiply_blocks(const Operands& o, std::int64_t from, std::int64_t to) {
  std::int64_t row = 0;
  (multiply_rows<Way, Block, X>(o, from, to, row), ...);
}

// X: numbers of rows at once, the largest first and 1 last.
template <typename Way, int... X>
void multiply_as(const Operands& o, std::int64_t from, std::int64_t to) {
  switch (o.form.block) {
    case 32: return multiply_blocks<Way, 32, X...>(o, from, to);
    case 64: return multiply_blocks<Way, 64, X...>(o, from, to);
    case 128: return multiply_blocks<Way, 128, X...>(o, from, to);
    default: return multiply_blocks<Way, 256, X...>(o, from, to);
  }
}

}  // namespace headport::kernels
