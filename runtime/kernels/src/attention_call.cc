#include "attention_call.h"

#include <algorithm>

namespace headport::kernels {
namespace {

void expect(bool holds, const char* what, std::int64_t expected, std::int64_t found) {
  if (!holds)
    throw Failure(std::string(what) + " of " + std::to_string(expected) + " was expected, " +
                  std::to_string(found) + " was found");
}

void expect_both(const OrtKernelContext* context, Input one, Input other) {
  if ((find_input(context, one) == nullptr) != (find_input(context, other) == nullptr))
    throw Failure("k and v, and cos and sin, were expected both or not at all; one was found");
}

Sizes read_sizes(const OrtKernelContext* context, std::int64_t heads, std::int64_t kv_heads) {
  const std::vector<std::int64_t> q = dims_of(find_input(context, kQ));
  const std::vector<std::int64_t> past = dims_of(find_input(context, kPastKey));
  if (q.size() != 3 || past.size() != 4) throw Failure("q [B, T, …] and caches [B, …, D] expected");
  const bool packed = find_input(context, kK) == nullptr;
  const Sizes size{heads, kv_heads, past[3], q[0], q[1], past[2], 0};
  expect(past[0] == q[0], "past_key: a batch", q[0], past[0]);
  expect(past[1] == kv_heads, "past_key: heads", kv_heads, past[1]);
  const std::int64_t width = (heads + (packed ? 2 * kv_heads : 0)) * size.D;
  expect(q[2] == width, "q: a width", width, q[2]);
  return size;
}

// Each row's tokens have slots and positions, and its new ones places.
void check_rows(const Call& call) {
  const Sizes& size = call.size;
  for (std::int64_t row = 0; row < size.batch; ++row) {
    const bool fits = call.lengths[row] < size.positions && call.added[row] >= 0 &&
                      call.added[row] <= size.tokens && call.first(row) >= 0;
    if (!fits)
      throw Failure("row " + std::to_string(row) + ": " + std::to_string(call.added[row]) +
                    " new of " + std::to_string(std::int64_t{call.lengths[row]} + 1) + " tokens, in " +
                    std::to_string(size.tokens) + " places and " +
                    std::to_string(size.positions) + " slots");
  }
}

}  // namespace

std::int64_t Call::longest() const {
  return size.batch == 0 ? 0 : *std::max_element(lengths, lengths + size.batch) + 1;
}

void Call::rotate(const float* from, std::int64_t position, float* to) const {
  const std::int64_t half = size.D / 2;
  if (cos == nullptr) {
    std::copy_n(from, size.D, to);
    return;
  }
  const float* c = cos + position * half;
  const float* s = sin + position * half;
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = from[i];
    const float b = from[i + half];
    to[i] = a * c[i] - b * s[i];
    to[i + half] = b * c[i] + a * s[i];
  }
}

void Call::store(std::int64_t row, std::int64_t kv_head) const {
  const std::int64_t past = first(row);
  const std::int64_t begin = cached(row, kv_head, 0);
  if (key != past_key) std::copy_n(past_key + begin, past * size.D, key + begin);
  if (value != past_value) std::copy_n(past_value + begin, past * size.D, value + begin);
  for (std::int64_t t = 0; t < added[row]; ++t) {
    const std::int64_t from = (row * size.tokens + t) * kv_stride + kv_head * size.D;
    const std::int64_t to = cached(row, kv_head, past + t);
    rotate(k + from, past + t, key + to);
    std::copy_n(v + from, size.D, value + to);
  }
}

void Call::read_query(std::int64_t row, std::int64_t kv_head, std::int64_t t, float* query) const {
  const std::int64_t count = size.group() * size.D;
  const float* from = q + (row * size.tokens + t) * q_stride + kv_head * count;
  for (std::int64_t i = 0; i < count; i += size.D) rotate(from + i, first(row) + t, query + i);
  for (std::int64_t i = 0; i < count; ++i) query[i] *= scale;
}

Call read_call(OrtKernelContext* context, std::int64_t heads, std::int64_t kv_heads, float scale) {
  expect_both(context, kK, kV);
  expect_both(context, kCos, kSin);
  Call call{};
  Sizes& size = call.size = read_sizes(context, heads, kv_heads);
  const std::int64_t rows = size.batch * size.tokens;
  const std::int64_t q_width = heads * size.D;
  const std::int64_t kv_width = kv_heads * size.D;
  const std::int64_t caches = size.batch * kv_heads * size.slots * size.D;
  if (find_input(context, kK) == nullptr) {
    call.q_stride = call.kv_stride = q_width + 2 * kv_width;
    call.q = read_input<float>(context, kQ, rows * call.q_stride, "q");
    call.k = call.q + q_width;
    call.v = call.k + kv_width;
  } else {
    call.q_stride = q_width;
    call.kv_stride = kv_width;
    call.q = read_input<float>(context, kQ, rows * q_width, "q");
    call.k = read_input<float>(context, kK, rows * kv_width, "k");
    call.v = read_input<float>(context, kV, rows * kv_width, "v");
  }
  call.past_key = read_input<float>(context, kPastKey, caches, "past_key");
  call.past_value = read_input<float>(context, kPastValue, caches, "past_value");
  call.lengths = read_input<std::int32_t>(context, kLengths, size.batch, "seqlens_k");
  call.added = read_input<std::int32_t>(context, kNew, size.batch, "query_seqlens");
  size.positions = size.slots;
  if (const OrtValue* cos = find_input(context, kCos)) {
    const std::vector<std::int64_t> dims = dims_of(cos);
    if (dims.size() != 2 || dims[1] * 2 != size.D) throw Failure("cos [positions, D / 2] expected");
    size.positions = std::min(size.slots, dims[0]);
    call.cos = read_input<float>(context, kCos, dims[0] * dims[1], "cos");
    call.sin = read_input<float>(context, kSin, dims[0] * dims[1], "sin");
  }
  call.scale = scale;
  check_rows(call);
  const std::vector<std::int64_t> cache{size.batch, kv_heads, size.slots, size.D};
  call.y = data_of<float>(make_output(context, 0, {size.batch, size.tokens, q_width}));
  call.key = data_of<float>(make_output(context, 1, cache));
  call.value = data_of<float>(make_output(context, 2, cache));
  return call;
}

}  // namespace headport::kernels
