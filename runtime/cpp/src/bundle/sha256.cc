#include "bundle/sha256.h"

#include <algorithm>
#include <cstring>

namespace headport::internal {
namespace {

constexpr std::uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1,
    0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3,
    0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr std::uint32_t rotate(std::uint32_t value, int bits) {
  return (value >> bits) | (value << (32 - bits));
}

}  // namespace

void Sha256::compress(const unsigned char* block) {
  std::uint32_t w[64];
  for (std::size_t t = 0; t < 16; ++t) {
    const unsigned char* word = block + 4 * t;
    w[t] = std::uint32_t{word[0]} << 24 | std::uint32_t{word[1]} << 16 |
           std::uint32_t{word[2]} << 8 | std::uint32_t{word[3]};
  }
  for (std::size_t t = 16; t < 64; ++t) {
    const std::uint32_t low = rotate(w[t - 15], 7) ^ rotate(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const std::uint32_t high = rotate(w[t - 2], 17) ^ rotate(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + low + w[t - 7] + high;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (std::size_t t = 0; t < 64; ++t) {
    const std::uint32_t one = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) +
                              ((e & f) ^ (~e & g)) + kRounds[t] + w[t];
    const std::uint32_t two = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) +
                              ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + one;
    d = c;
    c = b;
    b = a;
    a = one + two;
  }
  const std::uint32_t add[8] = {a, b, c, d, e, f, g, h};
  for (std::size_t n = 0; n < 8; ++n) state_[n] += add[n];
}

void Sha256::update(const unsigned char* data, std::size_t size) {
  bytes_ += size;
  while (size > 0) {
    if (pending_size_ == 0 && size >= 64) {
      compress(data);
      data += 64;
      size -= 64;
      continue;
    }
    const std::size_t part = std::min(size, 64 - pending_size_);
    std::memcpy(pending_.data() + pending_size_, data, part);
    pending_size_ += part;
    data += part;
    size -= part;
    if (pending_size_ == 64) {
      compress(pending_.data());
      pending_size_ = 0;
    }
  }
}

std::string Sha256::finish() {
  const std::uint64_t bits = bytes_ * 8;
  const unsigned char one = 0x80, zero = 0;
  update(&one, 1);
  while (pending_size_ != 56) update(&zero, 1);
  for (int shift = 56; shift >= 0; shift -= 8) {
    const auto byte = static_cast<unsigned char>(bits >> shift);
    update(&byte, 1);
  }
  std::string found;
  for (const std::uint32_t word : state_) {
    for (int shift = 28; shift >= 0; shift -= 4) found += "0123456789abcdef"[(word >> shift) & 15];
  }
  return found;
}

}  // namespace headport::internal
