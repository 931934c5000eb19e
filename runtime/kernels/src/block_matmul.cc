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
#include <array>
#include <utility>

#include "ort_api.h"
#include "product.h"
#include "scratch.h"

namespace headport::kernels {
namespace {

// Of weights, a thread's share at a time: small enough that threads end together.
constexpr std::int64_t kTileBytes = 1 << 14;
constexpr std::int64_t kRowsAlone = 16;  // fewer rows of x are rounded by one thread
constexpr std::array<std::pair<const char*, Activation>, 3> kActivations{
    {{"none", Activation::kNone}, {"silu", Activation::kSilu}, {"gelu_tanh", Activation::kGeluTanh}}};
enum Input : std::size_t { kX, kW, kS, kSkip, kGamma, kInputs };
enum Output : std::size_t { kY, kSum, kNormed, kProduct, kOutputs };

Form read_form(const OrtKernelInfo* info) {
  const Form form{whole_attribute(info, "N"), whole_attribute(info, "K"),
                  whole_attribute(info, "block_size"),
                  static_cast<int>(whole_attribute(info, "bits")),
                  static_cast<int>(whole_attribute(info, "activation_bits"))};
  const bool sizes = form.N > 0 && form.K > 0;
  const bool block = form.block == 32 || form.block == 64 || form.block == 128 || form.block == 256;
  if (!sizes || !block || (form.bits != 4 && form.bits != 8))
    throw Failure("N and K above 0, bits 4 or 8 and a block_size of 32, 64, 128 or 256 were expected; N " +
                  std::to_string(form.N) + ", K " + std::to_string(form.K) + ", bits " +
                  std::to_string(form.bits) + ", block_size " + std::to_string(form.block) +
                  " were found");
  if (form.activation_bits != 16 && (form.activation_bits != 8 || form.bits != 4))
    throw Failure("activation_bits 16, or 8 with weights of 4 bits, were expected; " +
                  std::to_string(form.activation_bits) + " with weights of " +
                  std::to_string(form.bits) + " were found");
  return form;
}

Activation read_activation(const OrtKernelInfo* info, const Form& form) {
  const std::string given = text_attribute(info, "activation");
  for (const auto& [name, activation] : kActivations)
    if (given == name) {
      if (activation != Activation::kNone && form.N % 2 != 0)
        throw Failure("an even N was expected for activation " + given + ", " +
                      std::to_string(form.N) + " was found");
      return activation;
    }
  throw Failure("activation none, silu or gelu_tanh was expected, " + given + " was found");
}

// For each thread that runs a session.
struct Buffers {
  Scratch<std::int16_t> q;
  Scratch<std::int8_t> byte_q;
  Scratch<float> step;
  Scratch<std::int32_t> offset;
  Scratch<std::int16_t> byte_offset;
  Scratch<float> normed;
  Scratch<float> product;

  void round_into(Operands& operands) {
    const Form& form = operands.form;
    const std::int64_t blocks = operands.rows * form.blocks();
    float* steps = step.sized(blocks);
    if (form.activation_bits == 8)
      operands.bytes = {
          byte_q.sized(operands.rows * RoundedBytes::padded(form)), steps,
          byte_offset.sized(operands.rows * RoundedBytes::sums(form) * kByteParts)};
    else
      operands.rounded = {q.sized(operands.rows * form.padded()), steps,
                          offset.sized(blocks * kParts)};
  }
};

// One call: what is done to rows before the product, and where all of it lies.
struct Before {
  const float* x = nullptr;
  const float* skip = nullptr;
  const float* gamma = nullptr;  // null: rows are multiplied as they are
  float epsilon = 0;
  float* sum = nullptr;
  float* normed = nullptr;

  void run(std::int64_t K, std::int64_t row, const Kernel& kernel) const {
    const std::int64_t at = row * K;
    kernel.normalise({x + at, skip == nullptr ? nullptr : skip + at, gamma, epsilon, K,
                      (sum == nullptr ? normed : sum) + at, normed + at});
  }
};

struct BlockMatMul {
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

struct BlockMatMulOperator : Operator {
  BlockMatMulOperator() {
    GetName = [](const OrtCustomOp*) { return "BlockMatMul"; };
    GetInputTypeCount = [](const OrtCustomOp*) -> std::size_t { return kInputs; };
    GetInputType = [](const OrtCustomOp*, std::size_t index) {
      return index == kW ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    };
    GetInputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
      return index >= kSkip ? OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_OPTIONAL
                            : OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_REQUIRED;
    };
    GetOutputTypeCount = [](const OrtCustomOp*) -> std::size_t { return kOutputs; };
    GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
      return index != kY ? OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_OPTIONAL
                         : OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_REQUIRED;
    };
    CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info,
                        void** made) {
      return guarded(op->GetName(op), [&] { *made = new BlockMatMul(info); });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      return guarded("BlockMatMul",
                     [&] { static_cast<const BlockMatMul*>(kernel)->compute(context); });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<BlockMatMul*>(kernel); };
  }
};

}  // namespace

const OrtCustomOp* block_matmul() {
  static const BlockMatMulOperator made;
  return &made;
}

}  // namespace headport::kernels
