// y = x Ŵᵀ: weights of 8 or 4 bits, activations of 16, summed in whole numbers block by block.
//
//     y[r, n] = Σ_b scale[n, b] · step[r, b] · Σ_{k in b} (w[n, k] - zero point) · q[r, k]
//
// The inner sum is exact, on AVX2 in eight parts, which are added up as float32. With q of 16 bits an
// activation is off by about max|x_b| / 65,534, which is less than what is lost by two rows of 8
// bits, for the price of one.
#pragma once

#include <cstdint>

namespace headport::kernels {

// A weight [N, K] as MatMulNBits stores it, with one zero point for all: 128 or 8.
struct Form {
  std::int64_t N = 0;
  std::int64_t K = 0;
  std::int64_t block = 0;  // weights that share a scale; a multiple of kGroup up to 256
  int bits = 0;            // 8 or 4

  std::int64_t blocks() const { return (K + block - 1) / block; }
  std::int64_t padded() const { return blocks() * block; }
  std::int64_t row_bytes() const { return padded() * bits / 8; }
  std::int32_t zero_point() const { return 1 << (bits - 1); }
};

// Both widths are unpacked into the even ones of 32 weights and the odd ones, so activations wait in
// that order: [e0 … e15, o0 … o15] for each group.
constexpr std::int64_t kGroup = 32;

// A block's sum is kept in eight parts: activation i of a group goes to part i % 16 / 2. Each has the
// zero point taken off it, so that what is rounded to float32 is a part of the sum that is wanted.
constexpr std::int64_t kParts = 8;

// Rows of x as whole numbers: x[k] is about q[k] · step of its block.
struct Rounded {
  std::int16_t* q = nullptr;       // [rows, padded]
  float* step = nullptr;           // [rows, blocks]; NaN where x is not finite
  std::int32_t* offset = nullptr;  // [rows, blocks, kParts]: - zero point · Σ q of the part
};

struct Operands {
  Form form;
  const float* x = nullptr;              // [rows, K]
  std::int64_t rows = 0;
  const std::uint8_t* weight = nullptr;  // [N, blocks, block · bits / 8]
  const float* scale = nullptr;          // [N, blocks]
  Rounded rounded;
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
struct Weighed {
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
  Weighed found;
};

// One way to compute all of it. A row of y never depends on the rows beside it.
struct Kernel {
  const char* name;
  void (*round)(const Operands&, std::int64_t from, std::int64_t to);     // rows of x
  void (*multiply)(const Operands&, std::int64_t from, std::int64_t to);  // rows of the weight
  void (*attend)(const Attended&);
  void (*normalise)(const Normalised&);
  void (*gate)(const Gated&);
};

extern const Kernel kPortable;
#if defined(__x86_64__)
extern const Kernel kAvx2;
#endif

// The fastest that this CPU has.
const Kernel& find_kernel();

}  // namespace headport::kernels
