// How threads share a call of CachedAttention.
//
// A share is some tokens of a row with the query heads that have their keys in common, so that these
// are read once. It takes their past chunk by chunk, and all its tokens with each while that is near.
// Where there are few shares, as in a decode step, each chunk is a share of its own: threads are busy
// alike, and what chunks weigh is put together afterwards, in the same order with the same result.
#pragma once

#include "attention_call.h"
#include "product.h"

namespace headport::kernels {

class Shares {
 public:
  Shares(const Call& call, const Kernel& kernel);

  std::int64_t count() const { return call_.size.batch * call_.size.kv_heads * tiles_ * splits_; }
  std::int64_t partials_size() const;  // numbers
  void use(float* room) { partials_ = room; }

  void compute(std::int64_t share) const;  // by any thread
  void join() const;                       // when all are computed

 private:
  // Y of a token's query heads that share a key head: what chunks weigh is put together and divided
  // by its sum; 0 in a place behind the row's new tokens.
  void complete(std::int64_t row, std::int64_t t, std::int64_t kv_head) const;

  // What a chunk weighs for a token's query heads that share a key head. The first one's is in Y.
  Partial at(std::int64_t row, std::int64_t t, std::int64_t kv_head, std::int64_t chunk) const;

  const Call& call_;
  const Kernel& kernel_;
  std::int64_t query_heads_;    // query heads of all tokens
  std::int64_t tiles_;  // of a row's tokens
  std::int64_t splits_;  // of a past: 1, or as many as it has chunks
  float* partials_ = nullptr;
};

}  // namespace headport::kernels
