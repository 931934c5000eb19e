// One call of CachedAttention: where everything lies, and what a token's heads go through.
#pragma once

#include "ort_api.h"

namespace headport::kernels {

enum Input : std::size_t { kQ, kK, kV, kPastKey, kPastValue, kLengths, kNew, kCos, kSin, kInputs };

struct Sizes {
  std::int64_t heads, kv_heads, D, batch, tokens, slots, positions;

  std::int64_t group() const { return heads / kv_heads; }  // query heads that share keys
};

struct Call {
  Sizes size;
  float scale;
  const float *q, *k, *v;
  std::int64_t q_stride, kv_stride;  // from token to token
  const float *cos, *sin;            // null where nothing is rotated
  const std::int32_t *lengths, *added;
  const float *past_key, *past_value;
  float *key, *value, *y;

  std::int64_t first(std::int64_t row) const {
    return std::int64_t{lengths[row]} + 1 - added[row];
  }
  std::int64_t cached(std::int64_t row, std::int64_t kv_head, std::int64_t slot) const {
    return ((row * size.kv_heads + kv_head) * size.slots + slot) * size.D;
  }
  std::int64_t longest() const;  // tokens of the row that has most

  // Halves of a head as the two parts of complex numbers, turned by the token's position.
  void rotate(const float* from, std::int64_t position, float* to) const;

  // Keys and values of the row's new tokens go behind its past.
  void store(std::int64_t row, std::int64_t kv_head) const;

  // Queries of new token t that share a key head, rotated and scaled: [group, D].
  void read_query(std::int64_t row, std::int64_t kv_head, std::int64_t t, float* query) const;
};

// Reads and checks all inputs, and makes the outputs.
Call read_call(OrtKernelContext* context, std::int64_t heads, std::int64_t kv_heads, float scale);

}  // namespace headport::kernels
