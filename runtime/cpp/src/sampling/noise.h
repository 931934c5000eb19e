// Gumbel noise as a pure function of (seed, sample, step, original id).
// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace headport::internal {

struct NoiseKey {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;    // index of the new token
  std::uint64_t sample = 0;  // index among the samples of one prompt
};

constexpr std::size_t kIdsPerBlock = 8;  // a block has four words, a word gives two draws

__extension__ typedef unsigned __int128 Wide;

// 256 random bits of the ids 8 · block … 8 · block + 7.
inline std::array<std::uint64_t, 4> philox(const NoiseKey& key, std::uint64_t block) {
  std::uint64_t c0 = block, c1 = key.step, c2 = key.sample, c3 = 0;
  std::uint64_t k0 = key.seed, k1 = 0;
  for (int round = 0; round < 10; ++round) {
    const Wide first = Wide{0xD2E7470EE14C6C93u} * c0;
    const Wide second = Wide{0xCA5A826395121157u} * c2;
    c0 = static_cast<std::uint64_t>(second >> 64) ^ c1 ^ k0;
    c1 = static_cast<std::uint64_t>(second);
    c2 = static_cast<std::uint64_t>(first >> 64) ^ c3 ^ k1;
    c3 = static_cast<std::uint64_t>(first);
    k0 += 0x9E3779B97F4A7C15u;
    k1 += 0xBB67AE8584CAA73Bu;
  }
  return {c0, c1, c2, c3};
}

// The draw of one place of a block, 0 … 7: the low half of a word belongs to the even id.
inline std::uint32_t bits_of(const std::array<std::uint64_t, 4>& block, std::size_t place) {
  return static_cast<std::uint32_t>(block[place / 2] >> (32 * (place % 2)));
}

inline std::uint32_t draw_bits(const NoiseKey& key, std::int64_t id) {
  const auto place = static_cast<std::uint64_t>(id);
  return bits_of(philox(key, place / kIdsPerBlock), place % kIdsPerBlock);
}

// The draws of ids that are asked for in ascending order: a block is made once.
class DrawBits {
 public:
  explicit DrawBits(const NoiseKey& key) : key_(key), words_(philox(key, 0)) {}

  std::uint32_t of(std::int64_t id) {
    const auto place = static_cast<std::uint64_t>(id);
    if (place / kIdsPerBlock != block_) {
      block_ = place / kIdsPerBlock;
      words_ = philox(key_, block_);
    }
    return bits_of(words_, place % kIdsPerBlock);
  }

 private:
  NoiseKey key_;
  std::uint64_t block_ = 0;
  std::array<std::uint64_t, 4> words_;
};

// Bits r → g = -ln(-ln u) with u = (2 r + 1) / 2^33, between -3.14 and 22.88.
inline double gumbel(std::uint32_t bits) {
  const double u = (static_cast<double>(bits) * 2.0 + 1.0) * 0x1p-33;
  return -std::log(-std::log(u));
}

}  // namespace headport::internal
