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
#include "attention_call.h"
#include "attention_shares.h"
#include "operator.h"
#include "product.h"
#include "scratch.h"

namespace headport::kernels {
namespace {

constexpr std::int64_t kStoredAlone = 16;  // tokens whose keys one thread stores sooner than two

struct CachedAttention {
  static constexpr const char* kName = "CachedAttention";
  static constexpr std::size_t kInputCount = kInputs;
  static constexpr std::size_t kOutputCount = 3;
  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index == kLengths || index == kNew ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32
                                              : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  static ONNXTensorElementDataType output_type(std::size_t) {
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  static bool is_optional_input(std::size_t index) {
    return index == kK || index == kV || index == kCos || index == kSin;
  }
  static bool is_optional_output(std::size_t) { return false; }

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

  void compute(OrtKernelContext* context) const {
    const Call call = read_call(context, heads, kv_heads, scale);
    const Sizes& size = call.size;
    const auto store = [&](std::int64_t i) { call.store(i / kv_heads, i % kv_heads); };
    const bool alone = call.key == call.past_key && size.batch * size.tokens <= kStoredAlone;
    if (alone)
      for (std::int64_t i = 0; i < size.batch * kv_heads; ++i) store(i);
    else
      in_parallel(context, size.batch * kv_heads, store);
    Shares shares(call, kernel);
    thread_local Scratch<float> room;
    shares.use(room.sized(shares.partials_size()));
    in_parallel(context, shares.count(), [&](std::int64_t i) { shares.compute(i); });
    shares.join();
  }
};

}  // namespace

const OrtCustomOp* cached_attention() {
  static const Operator<CachedAttention> made;
  return &made;
}

}  // namespace headport::kernels
