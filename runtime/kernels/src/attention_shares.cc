#include "attention_shares.h"

#include <algorithm>

#include "attention_parts.h"
#include "scratch.h"

namespace headport::kernels {
namespace {

constexpr std::int64_t kTokens = 8;  // of a share
constexpr std::int64_t kFew = 16;    // shares that do not keep threads busy alike

std::int64_t parts_of(std::int64_t count, std::int64_t size) { return (count + size - 1) / size; }

}  // namespace

Shares::Shares(const Call& call, const Kernel& kernel)
    : call_(call),
      kernel_(kernel),
      query_heads_(call.size.batch * call.size.tokens * call.size.heads),
      tiles_(parts_of(call.size.tokens, kTokens)),
      splits_(1) {
  if (tiles_ == 1 && call.size.batch * call.size.kv_heads < kFew)
    splits_ = std::max<std::int64_t>(1, parts_of(call.longest(), kMostKeys));
}

std::int64_t Shares::partials_size() const {
  return splits_ == 1 ? 2 * query_heads_ : splits_ * query_heads_ * (2 + call_.size.D);
}

Partial Shares::at(std::int64_t row, std::int64_t t, std::int64_t kv_head,
                   std::int64_t chunk) const {
  const Sizes& size = call_.size;
  const std::int64_t place = (row * size.tokens + t) * size.heads + kv_head * size.group();
  float* most = partials_ + chunk * query_heads_ * (2 + size.D);
  float* out = chunk == 0 ? call_.y : most + 2 * query_heads_;
  return {most + place, most + query_heads_ + place, out + place * size.D};
}

void Shares::compute(std::int64_t share) const {
  const Sizes& size = call_.size;
  const std::int64_t chunk = share % splits_;
  const std::int64_t from = share / splits_ % tiles_ * kTokens;
  const std::int64_t kv_head = share / splits_ / tiles_ % size.kv_heads;
  const std::int64_t row = share / splits_ / tiles_ / size.kv_heads;
  const std::int64_t to = std::min({size.tokens, from + kTokens, std::int64_t{call_.added[row]}});
  const std::int64_t width = size.group() * size.D;
  thread_local Scratch<float> scratch;
  float* const queries = scratch.sized(kTokens * width + 2 * size.group() + width);
  float* const numbers = queries + kTokens * width;
  const Partial next{numbers, numbers + size.group(), numbers + 2 * size.group()};
  for (std::int64_t t = from; t < to; ++t) call_.read_query(row, kv_head, t, queries + (t - from) * width);
  const std::int64_t first = chunk * kMostKeys;
  const std::int64_t last = splits_ == 1 ? call_.first(row) + to : first + kMostKeys;
  for (std::int64_t slot = first; slot < last; slot += kMostKeys) {
    const std::int64_t begin = call_.cached(row, kv_head, slot);
    for (std::int64_t t = from; t < to; ++t) {
      const std::int64_t count = call_.first(row) + t + 1 - slot;
      if (count <= 0) continue;
      const Partial found = at(row, t, kv_head, chunk);
      kernel_.attend({queries + (t - from) * width, size.group(), call_.key + begin,
                      call_.value + begin, std::min(count, kMostKeys), size.D,
                      slot == first ? found : next});
      if (slot != first) fold(found, next, size.group(), size.D);
    }
  }
  if (splits_ > 1) return;
  for (std::int64_t t = from; t < std::min(size.tokens, from + kTokens); ++t)
    complete(row, t, kv_head);
}

void Shares::complete(std::int64_t row, std::int64_t t, std::int64_t kv_head) const {
  const Sizes& size = call_.size;
  const Partial found = at(row, t, kv_head, 0);
  if (t >= call_.added[row]) {
    std::fill_n(found.out, size.group() * size.D, 0.0F);
    return;
  }
  const std::int64_t chunks = parts_of(call_.first(row) + t + 1, kMostKeys);
  for (std::int64_t chunk = 1; chunk < std::min(chunks, splits_); ++chunk)
    fold(found, at(row, t, kv_head, chunk), size.group(), size.D);
  finish(found, size.group(), size.D);
}

void Shares::join() const {
  if (splits_ == 1) return;
  for (std::int64_t row = 0; row < call_.size.batch; ++row)
    for (std::int64_t t = 0; t < call_.size.tokens; ++t)
      for (std::int64_t kv_head = 0; kv_head < call_.size.kv_heads; ++kv_head)
        complete(row, t, kv_head);
}

}  // namespace headport::kernels
