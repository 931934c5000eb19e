// Y, present_key, present_value =
//     CachedAttention(q, k, v, past_key, past_value, seqlens_k, query_seqlens, cos, sin)
//
// What com.microsoft GroupQueryAttention computes without windows, biases, sinks and softcap:
// q float32 [B, T, heads · D] with k and v [B, T, kv_heads · D], or all three side by side in q;
// caches float32 [B, kv_heads, slots, D]; seqlens_k int32 [B], tokens of a row less 1, new ones
// included; query_seqlens int32 [B], how many are new; cos and sin float32 [positions, D / 2], left
// out where heads are not rotated. Attributes num_heads, kv_num_heads, scale.
//
// Caches are bound in place, so past and present are the same memory; where they are not, the past
// is copied first. Y of places behind a row's new tokens is 0. A token's Y depends on nothing but
// its row's past: not on how many tokens come with it.
#include <algorithm>
#include <cmath>

#include "ort_api.h"
#include "product.h"

namespace headport::kernels {
namespace {

constexpr std::int64_t kQueries = 8;       // of one head: a thread's share at a time
constexpr std::int64_t kStoredAlone = 16;  // tokens whose keys one thread stores sooner than two
enum Input : std::size_t { kQ, kK, kV, kPastKey, kPastValue, kLengths, kNew, kCos, kSin, kInputs };

struct Sizes {
  std::int64_t heads, kv_heads, D, batch, tokens, slots, positions;
};

// One call: where everything lies.
struct Call {
  Sizes size;
  float scale;
  const float *q, *k, *v;
  std::int64_t q_stride, kv_stride;  // from token to token
  const float *cos, *sin;            // null where nothing is rotated
  const std::int32_t *lengths, *added;
  const float *past_key, *past_value;
  float *key, *value, *y;

  std::int64_t first(std::int64_t row) const { return lengths[row] + 1 - added[row]; }
  std::int64_t cached(std::int64_t row, std::int64_t head, std::int64_t slot) const {
    return ((row * size.kv_heads + head) * size.slots + slot) * size.D;
  }

  // Halves of a head as the two parts of complex numbers, turned by the token's position.
  void rotate(const float* from, std::int64_t position, float* to) const {
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

  // Keys and values of the row's new tokens go behind its past.
  void store(std::int64_t row, std::int64_t head) const {
    const std::int64_t past = first(row);
    const std::int64_t begin = cached(row, head, 0);
    if (key != past_key) std::copy_n(past_key + begin, past * size.D, key + begin);
    if (value != past_value) std::copy_n(past_value + begin, past * size.D, value + begin);
    for (std::int64_t t = 0; t < added[row]; ++t) {
      const std::int64_t from = (row * size.tokens + t) * kv_stride + head * size.D;
      const std::int64_t to = cached(row, head, past + t);
      rotate(k + from, past + t, key + to);
      std::copy_n(v + from, size.D, value + to);
    }
  }

  void attend(const Kernel& kernel, std::int64_t row, std::int64_t head, std::int64_t t,
              float* scratch) const {
    float* out = y + ((row * size.tokens + t) * size.heads + head) * size.D;
    if (t >= added[row]) {
      std::fill_n(out, size.D, 0.0F);
      return;
    }
    const std::int64_t position = first(row) + t;
    float* query = scratch;
    rotate(q + (row * size.tokens + t) * q_stride + head * size.D, position, query);
    for (std::int64_t i = 0; i < size.D; ++i) query[i] *= scale;
    const std::int64_t shared = head / (size.heads / size.kv_heads);
    kernel.attend({query, key + cached(row, shared, 0), value + cached(row, shared, 0),
                   position + 1, size.D, scratch + size.D, out});
  }
};

void expect(bool holds, const char* what, std::int64_t expected, std::int64_t found) {
  if (!holds)
    throw Failure(std::string(what) + " of " + std::to_string(expected) + " was expected, " +
                  std::to_string(found) + " was found");
}

struct CachedAttention {
  std::int64_t heads;
  std::int64_t kv_heads;
  float scale;
  const Kernel& kernel;

  explicit CachedAttention(const OrtKernelInfo* info)
      : heads(whole_attribute(info, "num_heads")),
        kv_heads(whole_attribute(info, "kv_num_heads")),
        scale(real_attribute(info, "scale")),
        kernel(find_kernel()) {
    if (heads <= 0 || kv_heads <= 0 || heads % kv_heads != 0 || !(scale > 0))
      throw Failure("num_heads a multiple of kv_num_heads and a scale above 0 were expected; " +
                    std::to_string(heads) + ", " + std::to_string(kv_heads) + " and " +
                    std::to_string(scale) + " were found");
  }

  Sizes read_sizes(const OrtKernelContext* context) const {
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

  Call read(OrtKernelContext* context) const {
    Call call{};
    Sizes& size = call.size = read_sizes(context);
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
    for (std::int64_t row = 0; row < size.batch; ++row) {
      const bool fits = call.lengths[row] < size.positions && call.added[row] >= 0 &&
                        call.added[row] <= size.tokens && call.first(row) >= 0;
      if (!fits)
        throw Failure("row " + std::to_string(row) + ": " + std::to_string(call.added[row]) +
                      " new of " + std::to_string(call.lengths[row] + 1) + " tokens, in " +
                      std::to_string(size.tokens) + " places and " +
                      std::to_string(size.positions) + " slots");
    }
    return call;
  }

  // Heads that are worked on at once read keys of different heads: the first reads them from memory,
  // which the others, some time later, need not.
  std::int64_t place(std::int64_t turn) const {
    return turn % kv_heads * (heads / kv_heads) + turn / kv_heads;
  }

  void compute(OrtKernelContext* context) const {
    Call call = read(context);
    const Sizes& size = call.size;
    const std::vector<std::int64_t> cache{size.batch, kv_heads, size.slots, size.D};
    call.y = data_of<float>(make_output(context, 0, {size.batch, size.tokens, heads * size.D}));
    call.key = data_of<float>(make_output(context, 1, cache));
    call.value = data_of<float>(make_output(context, 2, cache));
    const auto store = [&](std::int64_t i) { call.store(i / kv_heads, i % kv_heads); };
    const bool alone = call.key == call.past_key && size.batch * size.tokens <= kStoredAlone;
    if (alone)
      for (std::int64_t i = 0; i < size.batch * kv_heads; ++i) store(i);
    else
      in_parallel(context, size.batch * kv_heads, store);
    const std::int64_t shares = (size.tokens + kQueries - 1) / kQueries;
    in_parallel(context, size.batch * heads * shares, [&](std::int64_t i) {
      thread_local std::vector<float> scratch;
      const auto needed = static_cast<std::size_t>(size.D + size.slots + 8);
      if (scratch.size() < needed) scratch.resize(needed);
      const std::int64_t head = place(i / shares % heads);
      const std::int64_t from = i % shares * kQueries;
      for (std::int64_t t = from; t < std::min(size.tokens, from + kQueries); ++t)
        call.attend(kernel, i / shares / heads, head, t, scratch.data());
    });
  }
};

struct CachedAttentionOperator : Operator {
  CachedAttentionOperator() {
    GetName = [](const OrtCustomOp*) { return "CachedAttention"; };
    GetInputTypeCount = [](const OrtCustomOp*) -> std::size_t { return kInputs; };
    GetInputType = [](const OrtCustomOp*, std::size_t index) {
      return index == kLengths || index == kNew ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32
                                                : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    };
    GetInputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
      const bool optional = index == kK || index == kV || index == kCos || index == kSin;
      return optional ? OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_OPTIONAL
                      : OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_REQUIRED;
    };
    GetOutputTypeCount = [](const OrtCustomOp*) -> std::size_t { return 3; };
    CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info,
                        void** made) {
      return guarded(op->GetName(op), [&] { *made = new CachedAttention(info); });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      return guarded("CachedAttention",
                     [&] { static_cast<const CachedAttention*>(kernel)->compute(context); });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<CachedAttention*>(kernel); };
  }
};

}  // namespace

const OrtCustomOp* cached_attention() {
  static const CachedAttentionOperator made;
  return &made;
}

}  // namespace headport::kernels
