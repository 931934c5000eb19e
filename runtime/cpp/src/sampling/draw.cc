// Two logarithms for each id of a vocabulary cost far more than its random bits. With y = 1 - u,
// -ln u ≥ y, so g ≤ -ln y; and log2(1 + m) ≥ m, so a float32's own bits bound its logarithm. Only
// ids whose bound reaches the best sum so far need logarithms. The choice is the same without.
#include "sampling/draw.h"

#include <cmath>
#include <cstring>

#include "sampling/largest.h"
#include "sampling/scores.h"

namespace headport::internal {
namespace {

// Above all rounding of the bound and of a float32 score above -1000.
constexpr double kSlack = 1e-3;

// Upper bound of g, up to rounding.
inline float bound_of(std::uint32_t bits) {
  // float32 has no conversion from unsigned numbers that is one instruction; both halves do.
  const std::uint32_t rest = ~bits;
  const float y = static_cast<float>(static_cast<std::int32_t>(rest >> 16)) * 0x1p-16f +
                  (static_cast<float>(static_cast<std::int32_t>(rest & 0xffff)) + 0.5f) * 0x1p-32f;
  std::int32_t form = 0;
  std::memcpy(&form, &y, sizeof form);
  constexpr float kLn2 = 0.693147181f;
  return (127.0f - static_cast<float>(form) * 0x1p-23f) * kLn2;
}

// Bits below which no score of 0 or less reaches a sum: g ≥ sum is u ≥ exp(-exp(-sum)).
std::uint32_t least_bits(double sum) {
  const double least = std::exp(-std::exp(kSlack - sum)) * 0x1p32 - 1.5;
  return least > 0.0 ? static_cast<std::uint32_t>(least) : 0;
}

struct Best {
  double sum;
  std::size_t place;

  void offer(double other, std::size_t at) {
    if (other > sum || (other == sum && at < place)) {
      sum = other;
      place = at;
    }
  }
};

}  // namespace

std::size_t draw_from_row(const float* logits, std::size_t size, double temperature,
                          const NoiseKey& key) {
  const std::size_t first = argmax(logits, size);
  const float top = logits[first];
  const float inverse = static_cast<float>(1.0 / temperature);
  Best best{gumbel(draw_bits(key, static_cast<std::int64_t>(first))), first};
  auto exact = [&](std::size_t n, std::uint32_t bits) {
    best.offer(scaled(logits[n], top, temperature) + gumbel(bits), n);
  };
  std::uint32_t least = least_bits(best.sum);
  std::size_t n = 0;
  for (; n + kIdsPerBlock <= size; n += kIdsPerBlock) {
    const auto words = philox(key, n / kIdsPerBlock);
    bool likely = false;
    for (const std::uint64_t word : words) {
      likely |= ((word >> 32) >= least) | ((word & 0xffffffffu) >= least);
    }
    if (!likely) continue;
    std::uint32_t bits[kIdsPerBlock];
    for (std::size_t place = 0; place < kIdsPerBlock; ++place) bits[place] = bits_of(words, place);
    const auto floor = static_cast<float>(best.sum - kSlack);
    int alive = 0;
    for (std::size_t place = 0; place < kIdsPerBlock; ++place) {
      const float bound = (logits[n + place] - top) * inverse + bound_of(bits[place]);
      alive |= bound >= floor ? 1 : 0;
    }
    if (alive == 0) continue;
    for (std::size_t place = 0; place < kIdsPerBlock; ++place) {
      const float bound = (logits[n + place] - top) * inverse + bound_of(bits[place]);
      if (bound >= floor) exact(n + place, bits[place]);
    }
    least = least_bits(best.sum);
  }
  for (; n < size; ++n) exact(n, draw_bits(key, static_cast<std::int64_t>(n)));
  return best.place;
}

std::size_t draw_from(const double* scores, const std::int64_t* ids, std::size_t size,
                      double temperature, const NoiseKey& key) {
  const std::size_t first = argmax(scores, size);
  const double top = scores[first];
  Best best{gumbel(draw_bits(key, ids[first])), first};
  DrawBits draws(key);
  for (std::size_t n = 0; n < size; ++n) {
    const std::uint32_t bits = draws.of(ids[n]);
    const double s = scaled(scores[n], top, temperature);
    if (s + static_cast<double>(bound_of(bits)) < best.sum - kSlack) continue;
    best.offer(s + gumbel(bits), n);
  }
  return best.place;
}

}  // namespace headport::internal
