// Y = BlockMatMul(X, W, S)      attributes N, K, bits, block_size
//
// X float32 [..., K], W uint8 [N, blocks, block_size · bits / 8], S float32 [N, blocks] (or as many
// in one row), Y float32 [..., N]: the inputs and layout of com.microsoft MatMulNBits without zero
// points. See product.h for the arithmetic.
#include <algorithm>

#include "ort_api.h"
#include "product.h"

namespace headport::kernels {
namespace {

// Of weights, a thread's share at a time: small enough that threads end together.
constexpr std::int64_t kTileBytes = 1 << 14;
constexpr std::int64_t kRowsAlone = 16;       // fewer rows of x are rounded by one thread

Form read_form(const OrtKernelInfo* info) {
  const Form form{whole_attribute(info, "N"), whole_attribute(info, "K"),
                  whole_attribute(info, "block_size"),
                  static_cast<int>(whole_attribute(info, "bits"))};
  const bool sizes = form.N > 0 && form.K > 0;
  const bool block = form.block >= kGroup && form.block <= 256 && form.block % kGroup == 0;
  if (!sizes || !block || (form.bits != 4 && form.bits != 8))
    throw Failure("N and K above 0, bits 4 or 8 and a block_size of 32 to 256 were expected; N " +
                  std::to_string(form.N) + ", K " + std::to_string(form.K) + ", bits " +
                  std::to_string(form.bits) + ", block_size " + std::to_string(form.block) +
                  " were found");
  return form;
}

// Kept from call to call, for each thread that runs a session.
struct Scratch {
  std::vector<std::int16_t> q;
  std::vector<float> step;
  std::vector<std::int32_t> offset;

  Rounded sized(const Form& form, std::int64_t rows) {
    const auto values = static_cast<std::size_t>(rows * form.padded());
    const auto blocks = static_cast<std::size_t>(rows * form.blocks());
    if (q.size() < values) q.resize(values);
    if (step.size() < blocks) step.resize(blocks), offset.resize(blocks * kParts);
    return {q.data(), step.data(), offset.data()};
  }
};

struct BlockMatMul {
  Form form;
  const Kernel& kernel;

  void compute(OrtKernelContext* context) const {
    std::vector<std::int64_t> dims = dims_of(find_input(context, 0));
    if (dims.empty() || dims.back() != form.K)
      throw Failure("X [..., " + std::to_string(form.K) + "] was expected, its last dimension is " +
                    (dims.empty() ? std::string("missing") : std::to_string(dims.back())));
    const std::int64_t rows = product_of(dims) / form.K;
    dims.back() = form.N;
    OrtValue* y = make_output(context, 0, dims);
    if (rows == 0) return;
    thread_local Scratch scratch;
    Operands operands;
    operands.form = form;
    operands.rows = rows;
    operands.x = read_input<float>(context, 0, rows * form.K, "X");
    operands.weight = read_input<std::uint8_t>(context, 1, form.N * form.row_bytes(), "W");
    operands.scale = read_input<float>(context, 2, form.N * form.blocks(), "S");
    operands.rounded = scratch.sized(form, rows);
    operands.y = data_of<float>(y);
    if (rows < kRowsAlone)
      kernel.round(operands, 0, rows);
    else
      in_parallel(context, (rows + kRowsAlone - 1) / kRowsAlone, [&](std::int64_t share) {
        kernel.round(operands, share * kRowsAlone, std::min(rows, (share + 1) * kRowsAlone));
      });
    const std::int64_t size = std::max<std::int64_t>(2, kTileBytes / form.row_bytes() / 2 * 2);
    in_parallel(context, (form.N + size - 1) / size, [&](std::int64_t share) {
      kernel.multiply(operands, share * size, std::min(form.N, (share + 1) * size));
    });
  }
};

struct BlockMatMulOperator : Operator {
  BlockMatMulOperator() {
    GetName = [](const OrtCustomOp*) { return "BlockMatMul"; };
    GetInputTypeCount = [](const OrtCustomOp*) -> std::size_t { return 3; };
    GetInputType = [](const OrtCustomOp*, std::size_t index) {
      return index == 1 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    };
    GetOutputTypeCount = [](const OrtCustomOp*) -> std::size_t { return 1; };
    CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info,
                        void** made) {
      return guarded(op->GetName(op),
                     [&] { *made = new BlockMatMul{read_form(info), find_kernel()}; });
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
