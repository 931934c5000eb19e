// y = x Ŵᵀ: weights of 8 or 4 bits, activations of 16 or 8, summed in whole numbers block by block.
//
//     y[r, n] = Σ_b scale[n, b] · step[r, b] · Σ_{k in b} (w[n, k] - zero point) · q[r, k]
//
// The inner sum is exact, on AVX2 in eight parts, which are added up as float32. With q of 16 bits an
// activation is off by about max|x_b| / 65,534, which is less than what is lost by two rows of 8
// bits, for the price of one. With 8 bits it is max|x_b| / 254, for half of that price, where
// weights have 4; for weights of 8 the price would be the same.
#pragma once

#include <cstdint>

namespace headport::kernels {

// A weight [N, K] as MatMulNBits stores it, with one zero point for all: 128 or 8.
struct Form {
  std::int64_t N = 0;
  std::int64_t K = 0;
  std::int64_t block = 0;    // weights that share a scale: 32, 64, 128 or 256
  int bits = 0;              // 8 or 4
  int activation_bits = 16;  // 16, or 8 where bits are 4

  std::int64_t blocks() const { return (K + block - 1) / block; }
  std::int64_t padded() const { return blocks() * block; }
  std::int64_t row_bytes() const { return padded() * bits / 8; }
  std::int32_t zero_point() const { return 1 << (bits - 1); }
};

// Both widths are unpacked into the even ones of a group's weights and the odd ones, so activations
// wait in that order: [e0 … e15, o0 … o15] for each group of 32, and for 8 bits for each of 64.
constexpr std::int64_t kGroup = 32;
constexpr std::int64_t kByteGroup = 64;

// A block's sum is kept in eight parts: activation i of a group goes to part i / 4. Each has the
// zero point taken off it, so that what is rounded to float32 is a part of the sum that is wanted.
constexpr std::int64_t kParts = 8;

// Rows of x as whole numbers: x[k] is about q[k] · step of its block.
struct Rounded {
  std::int16_t* q = nullptr;       // [rows, padded]
  float* step = nullptr;           // [rows, blocks]; NaN where x is not finite
  std::int32_t* offset = nullptr;  // [rows, blocks, kParts]: - zero point · Σ q of the part
};

// The same for activations of 8 bits. A sum is of 64 weights, or of a block where that is larger, in
// 16 parts, alike. K is filled up to whole groups.
constexpr std::int64_t kByteParts = 16;
struct RoundedBytes {
  std::int8_t* q = nullptr;        // [rows, padded]
  float* step = nullptr;           // [rows, blocks]; NaN where x is not finite
  std::int16_t* offset = nullptr;  // [rows, sums, kByteParts]: - zero point · Σ q of the part

  static std::int64_t padded(const Form& form) {
    return (form.padded() + kByteGroup - 1) / kByteGroup * kByteGroup;
  }
  static std::int64_t sums(const Form& form) {
    return padded(form) / (form.block < kByteGroup ? kByteGroup : form.block);
  }
};

struct Operands {
  Form form;
  const float* x = nullptr;              // [rows, K]
  std::int64_t rows = 0;
  const std::uint8_t* weight = nullptr;  // [N, blocks, block · bits / 8]
  const float* scale = nullptr;          // [N, blocks]
  Rounded rounded;       // for activations of 16 bits
  RoundedBytes bytes;    // for those of 8
  float* y = nullptr;  // [rows, N]
};

// A row of x before it is multiplied: sum = x + skip, normed = sum / sqrt(mean(sum²) + epsilon) · gamma.
struct Normalised {
  const float* x;     // [K]
  const float* skip;  // [K]; null: nothing is added
  const float* gamma;
  float epsilon;
  std::int64_t K;
  float* sum;     // [K]
  float* normed;  // [K]
};

// What one half of a product's outputs goes through before it multiplies the other half.
enum class Activation { kNone, kSilu, kGeluTanh };

// y[i] = activation(gate[i]) · up[i], with g · sigmoid(t): t = g for SiLU, and for GELU in its tanh
// form t = 2 √(2/π) (g + 0.044715 g³).
struct Gated {
  Activation activation;
  const float* gate;  // [count]
  const float* up;
  std::int64_t count;
  float* y;
};

constexpr float kGeluLinear = 1.5957691216F;  // 2 √(2/π)
constexpr float kGeluCubic = 0.0713548163F;   // 0.044715 · that

// A token's past is taken in chunks of as many keys, so that threads can share it and room for scores
// is fixed. What a token gives depends on this number, and not on who computes which chunk.
constexpr std::int64_t kMostKeys = 128;

// Values as some of the keys weigh them, for each of several queries. With s_j = query · key_j:
//     most = max_j s_j,  sum = Σ_j exp(s_j - most),  out = Σ_j exp(s_j - most) value_j
struct Partial {
  float* most;  // [queries]; finite where all scores are -infinity, which weigh nothing
  float* sum;   // [queries]
  float* out;   // [queries, D]
};

// Queries that share keys and values, against a chunk of these.
struct Attended {
  const float* query;  // [queries, D], scaled
  std::int64_t queries;
  const float* keys;  // [count, D]
  const float* values;
  std::int64_t count;  // 1 … kMostKeys
  std::int64_t D;
  Partial found;
};

// What a vocabulary's tokens are picked by: bounds of their logits, and noise on them.
struct Keys {
  const float* upper;
  const float* noise;
  std::int64_t stride;  // of noise: 1, or 0 where one number is for all

  float at(std::int64_t token) const { return upper[token] + noise[token * stride]; }
};

struct Ranking {
  // The first token from `from` on whose key is above, or is no number; `to` where there is none.
  std::int64_t (*next_above)(const Keys&, std::int64_t from, std::int64_t to, float threshold);
  float (*largest)(const float* values, std::int64_t count);
  // Σ exp(value - shift), each within 2e-7 of itself; shift is the largest value or more.
  float (*exp_sum)(const float* values, std::int64_t count, float shift);
  double (*dot)(const float* weight, const double* x, std::int64_t count);  // in float64
};

// A row of y never depends on the rows beside it.
struct Product {
  void (*round)(const Operands&, std::int64_t from, std::int64_t to);     // rows of x
  void (*multiply)(const Operands&, std::int64_t from, std::int64_t to);  // rows of the weight
};

// One way to compute all of it.
struct Kernel {
  const char* name;
  Product words;  // activations of 16 bits
  Product bytes;  // of 8
  void (*attend)(const Attended&);
  void (*normalise)(const Normalised&);
  void (*gate)(const Gated&);
  Ranking ranking;

  const Product& product(const Form& form) const {
    return form.activation_bits == 8 ? bytes : words;
  }
};

extern const Kernel kPortable;
#if defined(__x86_64__)
extern const Kernel kAvx2;
#endif

// The fastest that this CPU has.
const Kernel& find_kernel();

}  // namespace headport::kernels
