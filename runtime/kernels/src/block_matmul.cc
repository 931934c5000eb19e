// Y, sum, normed, product = BlockMatMul(X, W, S, skip, gamma)
//     attributes N, K, bits, block_size, activation_bits, activation, epsilon
//
//     sum = X + skip                                     X without skip
//     normed = sum / sqrt(mean(sum²) + epsilon) · gamma  X without gamma; then no sum or normed is made
//     product = normed Ŵᵀ
//     Y = product, or activation(its first half) · its second half
//
// X and skip float32 [..., K], W uint8 [N, blocks, block_size · bits / 8], S float32 [N, blocks] (or as
// many in one row), gamma float32 [K]; Y float32 [..., N], or N / 2 with an activation: silu,
// gelu_tanh, none. W and S lie as for com.microsoft MatMulNBits without zero points. skip needs gamma.
// All outputs but Y may be left out. See product.h for the arithmetic.
#include <algorithm>

#include "matmul_call.h"
#include "operator.h"

namespace headport::kernels {
namespace {

// Of weights, a thread's share at a time: small enough that threads end together.
constexpr std::int64_t kTileBytes = 1 << 14;
constexpr std::int64_t kRowsAlone = 16;  // fewer rows of x are rounded by one thread
enum Input : std::size_t { kX, kW, kS, kSkip, kGamma, kInputs };
enum Output : std::size_t { kY, kSum, kNormed, kProduct, kOutputs };

struct BlockMatMul {
  static constexpr const char* kName = "BlockMatMul";
  static constexpr std::size_t kInputCount = kInputs;
  static constexpr std::size_t kOutputCount = kOutputs;
  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index == kW ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  static ONNXTensorElementDataType output_type(std::size_t) {
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  static bool is_optional_input(std::size_t index) { return index >= kSkip; }
  static bool is_optional_output(std::size_t index) { return index != kY; }

  Form form;
  Activation activation;
  float epsilon;
  const Kernel& kernel;
  const std::uint8_t* weight;  // null where it is no constant, as the two below
  const float* scale;
  const float* gamma;

  explicit BlockMatMul(const OrtKernelInfo* info)
      : form(read_form(info)),
        activation(read_activation(info, form)),
        epsilon(real_attribute(info, "epsilon")),
        kernel(find_kernel()),
        weight(constant_input<std::uint8_t>(info, kW, form.N * form.row_bytes(), "W")),
        scale(constant_input<float>(info, kS, form.N * form.blocks(), "S")),
        gamma(constant_input<float>(info, kGamma, form.K, "gamma")) {}

  Before read_before(OrtKernelContext* context, const std::vector<std::int64_t>& dims,
                     std::int64_t rows, Buffers& buffers) const {
    Before before;
    before.x = data_of<float>(find_input(context, kX));
    const OrtValue* skip = find_input(context, kSkip);
    before.gamma = gamma;
    if (gamma == nullptr && find_input(context, kGamma) != nullptr)
      before.gamma = read_input<float>(context, kGamma, form.K, "gamma");
    if (before.gamma == nullptr) {
      if (skip != nullptr) throw Failure("skip needs gamma");
      return before;
    }
    if (skip != nullptr) {
      if (dims_of(skip) != dims) throw Failure("skip with the dimensions of X was expected");
      before.skip = data_of<float>(skip);
    }
    before.epsilon = epsilon;
    before.sum = find_output(context, kSum, dims);
    before.normed = find_output(context, kNormed, dims);
    if (before.normed == nullptr) before.normed = buffers.normed.sized(rows * form.K);
    return before;
  }

  void compute(OrtKernelContext* context) const {
    std::vector<std::int64_t> dims = dims_of(find_input(context, kX));
    if (dims.empty() || dims.back() != form.K)
      throw Failure("X [..., " + std::to_string(form.K) + "] was expected, its last dimension is " +
                    (dims.empty() ? std::string("missing") : std::to_string(dims.back())));
    const std::int64_t rows = product_of(dims) / form.K;
    thread_local Buffers buffers;
    const Before before = read_before(context, dims, rows, buffers);
    const bool gated = activation != Activation::kNone;
    dims.back() = form.N;
    float* product = find_output(context, kProduct, dims);
    if (gated) dims.back() /= 2;
    float* y = data_of<float>(make_output(context, kY, dims));
    if (rows == 0) return;
    if (product == nullptr) product = gated ? buffers.product.sized(rows * form.N) : y;
    Operands operands;
    operands.form = form;
    operands.rows = rows;
    operands.x = before.gamma == nullptr ? before.x : before.normed;
    operands.weight = weight;
    if (weight == nullptr)
      operands.weight = read_input<std::uint8_t>(context, kW, form.N * form.row_bytes(), "W");
    operands.scale = scale;
    if (scale == nullptr)
      operands.scale = read_input<float>(context, kS, form.N * form.blocks(), "S");
    buffers.round_into(operands);
    operands.y = product;
    prepare(context, before, operands);
    multiply(context, operands, y);
  }

  void prepare(const OrtKernelContext* context, const Before& before,
               const Operands& operands) const {
    const auto prepared = [&](std::int64_t from, std::int64_t to) {
      if (before.gamma != nullptr)
        for (std::int64_t row = from; row < to; ++row) before.run(form.K, row, kernel);
      kernel.product(form).round(operands, from, to);
    };
    if (operands.rows < kRowsAlone) return prepared(0, operands.rows);
    const std::int64_t shares = (operands.rows + kRowsAlone - 1) / kRowsAlone;
    in_parallel(context, shares, [&](std::int64_t share) {
      prepared(share * kRowsAlone, std::min(operands.rows, (share + 1) * kRowsAlone));
    });
  }

  void multiply(const OrtKernelContext* context, const Operands& operands, float* y) const {
    const Product& product = kernel.product(form);
    const bool gated = activation != Activation::kNone;
    const std::int64_t outputs = gated ? form.N / 2 : form.N;
    const std::int64_t bytes = gated ? 2 * form.row_bytes() : form.row_bytes();
    const std::int64_t size = std::max<std::int64_t>(2, kTileBytes / bytes / 2 * 2);
    in_parallel(context, (outputs + size - 1) / size, [&](std::int64_t share) {
      const std::int64_t from = share * size;
      const std::int64_t to = std::min(outputs, from + size);
      product.multiply(operands, from, to);
      if (gated)
        product.multiply(operands, outputs + from, outputs + to);
      else if (operands.y == y)
        return;
      for (std::int64_t row = 0; row < operands.rows; ++row) {
        const float* made = operands.y + row * form.N + from;
        float* out = y + row * outputs + from;
        if (gated)
          kernel.gate({activation, made, made + outputs, to - from, out});
        else
          std::copy_n(made, to - from, out);
      }
    });
  }
};

}  // namespace

const OrtCustomOp* block_matmul() {
  static const Operator<BlockMatMul> made;
  return &made;
}

}  // namespace headport::kernels
