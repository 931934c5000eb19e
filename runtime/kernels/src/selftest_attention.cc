// The self-test of CachedAttention as an operator: rotation, storing, and what threads share.
#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_shares.h"
#include "selftest.h"

namespace headport::kernels {
namespace {

constexpr std::int64_t kGroup3 = 3;  // query heads of each key head
constexpr std::int64_t kD = 16;
constexpr std::int64_t kSlots = kMostKeys + 20;

// A row that begins with nothing and is given pieces of these sizes: by one share for each key head,
// and, in the last, by one for each chunk.
constexpr std::int64_t kPieces[] = {kMostKeys + 5, 3, 1};
constexpr std::int64_t kTokens = kMostKeys + 9;
constexpr Sizes kSize{2 * kGroup3, 2, kD, 1, 0, kSlots, kSlots};

struct Row {
  std::vector<float> q, k, v, cos, sin, key, value, y;

  Row() {
    std::uint32_t state = 3;
    const auto fill = [&state](std::vector<float>& values, std::int64_t count) {
      values.resize(static_cast<std::size_t>(count));
      for (float& each : values) {
        state = state * 1664525U + 1013904223U;
        each = static_cast<float>(state >> 8) / 8388608.0F - 1.0F;
      }
    };
    fill(q, kTokens * kSize.heads * kD);
    fill(k, kTokens * kSize.kv_heads * kD);
    fill(v, kTokens * kSize.kv_heads * kD);
    fill(cos, kSlots * kD / 2);
    fill(sin, kSlots * kD / 2);
    key.resize(static_cast<std::size_t>(kSize.kv_heads * kSlots * kD));
    value.resize(key.size());
    y.resize(q.size());
  }

  void run(const Kernel& kernel) {
    std::int64_t past = 0;
    for (const std::int64_t count : kPieces) {
      const auto length = static_cast<std::int32_t>(past + count - 1);
      const auto added = static_cast<std::int32_t>(count);
      Call call{};
      call.size = kSize;
      call.size.tokens = count;
      call.scale = 0.5F;
      call.q_stride = kSize.heads * kD;
      call.kv_stride = kSize.kv_heads * kD;
      call.q = q.data() + past * call.q_stride;
      call.k = k.data() + past * call.kv_stride;
      call.v = v.data() + past * call.kv_stride;
      call.cos = cos.data();
      call.sin = sin.data();
      call.lengths = &length;
      call.added = &added;
      call.key = key.data();
      call.value = value.data();
      call.past_key = call.key;
      call.past_value = call.value;
      call.y = y.data() + past * call.q_stride;
      for (std::int64_t head = 0; head < kSize.kv_heads; ++head) call.store(0, head);
      Shares shares(call, kernel);
      std::vector<float> partials(static_cast<std::size_t>(shares.partials_size()));
      shares.use(partials.data());
      for (std::int64_t i = shares.count(); i-- > 0;) shares.compute(i);
      shares.join();
      past += count;
    }
  }

  // Halves of a head, turned by its token's position, in float64.
  std::vector<double> turned(const float* from, std::int64_t token) const {
    std::vector<double> to(static_cast<std::size_t>(kD));
    for (std::int64_t i = 0; i < kD / 2; ++i) {
      const auto at = static_cast<std::size_t>(token * kD / 2 + i);
      const double a = from[i], b = from[i + kD / 2];
      to[static_cast<std::size_t>(i)] = a * cos[at] - b * sin[at];
      to[static_cast<std::size_t>(i + kD / 2)] = b * cos[at] + a * sin[at];
    }
    return to;
  }

  double error(std::int64_t token, std::int64_t head) const {
    const std::int64_t kv_head = head / kGroup3;
    const std::vector<double> query = turned(q.data() + (token * kSize.heads + head) * kD, token);
    std::vector<double> out(static_cast<std::size_t>(kD));
    double total = 0;
    for (std::int64_t j = 0; j <= token; ++j) {
      const std::int64_t at = (j * kSize.kv_heads + kv_head) * kD;
      const std::vector<double> other = turned(k.data() + at, j);
      double score = 0;
      for (std::size_t i = 0; i < query.size(); ++i) score += query[i] * other[i];
      const double weight = std::exp(0.5 * score);
      total += weight;
      for (std::size_t i = 0; i < out.size(); ++i)
        out[i] += weight * double{v[static_cast<std::size_t>(at) + i]};
    }
    double largest = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double found = y[static_cast<std::size_t>((token * kSize.heads + head) * kD) + i];
      const double apart = std::fabs(found - out[i] / total);
      if (!std::isfinite(apart)) return apart;
      largest = std::max(largest, apart);
    }
    return largest;
  }
};

}  // namespace

std::string find_operator_fault(const Kernel& kernel) {
  Row row;
  row.run(kernel);
  for (const std::int64_t token : {0L, 7L, long{kMostKeys} - 1, long{kMostKeys}, long{kTokens} - 4,
                                   long{kTokens} - 1})
    for (std::int64_t head = 0; head < kSize.heads; ++head)
      if (!(row.error(token, head) <= 1e-5))
        return std::string(kernel.name) + ": attention of token " + std::to_string(token) +
               " differs from float64";
  return {};
}

}  // namespace headport::kernels
