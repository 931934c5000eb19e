// SHA-256 of files. Own code, so that embedding the library brings no cryptography library along.
// Source: FIPS 180-4; the round constants are the fractions of the cube roots of the first primes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace headport::internal {

class Sha256 {
 public:
  void update(const unsigned char* data, std::size_t size);
  std::string finish();  // 64 hexadecimal digits; nothing may follow

 private:
  void compress(const unsigned char* block);

  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> pending_{};
  std::size_t pending_size_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace headport::internal
