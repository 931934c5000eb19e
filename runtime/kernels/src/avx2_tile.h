// A product of weights and rounded activations, whatever their bits. Compiled for AVX2 and FMA.
#pragma once

#include "avx2.h"

namespace headport::kernels {

// Where all lies. Worked out once for many tiles: the divisions in it take as long as a short row.
template <typename Whole, typename Offset>
struct View {
  const std::uint8_t* weight;
  const float* scale;
  const Whole* q;
  const float* step;
  const Offset* offset;
  float* y;
  std::int64_t row_bytes, blocks;   // of a row of the weight
  std::int64_t activations, offsets;  // of a row of x
  std::int64_t N;
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
//     view(o)             View
//     Way(bytes)          unpacked weights
//     Way(bytes, kHalfOfGroup)   of half a group, the rest zero; where kGroup is two blocks
//     add(sum, q)         the sum and a group's products
//     whole(sum)          as float32
template <typename Way, int Block, int X, typename Viewed>
void tile(const Viewed& v, std::int64_t n, std::int64_t row) {
  constexpr std::int64_t together = Block < Way::kGroup ? 2 : 1;  // blocks in a sum
  constexpr std::int64_t groups = Block * together / Way::kGroup;
  const std::uint8_t* weight = v.weight + n * v.row_bytes;
  const float* scale = v.scale + n * v.blocks;
  const auto* q = v.q + row * v.activations;
  const float* step = v.step + row * v.blocks;
  const auto* offset = v.offset + row * v.offsets;
  __m256 total[X];
  for (__m256& one : total) one = _mm256_setzero_ps();
  for (std::int64_t b = 0; b + together <= v.blocks; b += together) {
    __m256i sum[X];
    for (int x = 0; x < X; ++x) sum[x] = load(offset + x * v.offsets);
    for (std::int64_t g = 0; g < groups; ++g) {
      if constexpr (X == 1)
        _mm_prefetch(reinterpret_cast<const char*>(weight + Way::kAhead), _MM_HINT_T0);
      const Way unpacked(weight);
      for (int x = 0; x < X; ++x) sum[x] = unpacked.add(sum[x], q + x * v.activations);
      weight += Way::kBytes;
      q += Way::kGroup;
    }
    for (int x = 0; x < X; ++x)
      total[x] = _mm256_fmadd_ps(Way::whole(sum[x]),
                                 unit<together>(scale + b, step + x * v.blocks + b), total[x]);
    offset += Way::kParts;
  }
  if constexpr (together == 2)
    if (v.blocks % 2 != 0) {  // the other half of the last group is zero
      const Way unpacked(weight, kHalfOfGroup);
      for (int x = 0; x < X; ++x) {
        const __m256i sum = unpacked.add(load(offset + x * v.offsets), q + x * v.activations);
        const __m256 worth = unit<1>(scale + v.blocks - 1, step + (x + 1) * v.blocks - 1);
        total[x] = _mm256_fmadd_ps(Way::whole(sum), worth, total[x]);
      }
    }
  for (int x = 0; x < X; ++x) v.y[(row + x) * v.N + n] = sum_of(total[x]);
}

// So many rows of x at once while there are as many: weights are unpacked once for all of them.
template <typename Way, int Block, int X, typename Viewed>
void multiply_rows(const Viewed& v, std::int64_t rows, std::int64_t from, std::int64_t to,
                   std::int64_t& row) {
  for (; row + X <= rows; row += X)
    for (std::int64_t n = from; n < to; ++n) tile<Way, Block, X>(v, n, row);
}

template <typename Way, int Block, int... X>
void multiply_blocks(const Operands& o, std::int64_t from, std::int64_t to) {
  const auto view = Way::view(o);
  std::int64_t row = 0;
  (multiply_rows<Way, Block, X>(view, o.rows, from, to, row), ...);
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
