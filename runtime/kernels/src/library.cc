// The operator library that ONNX Runtime loads: domain headport.kernels, operator BlockMatMul.
//
//     Y = BlockMatMul(X, W, S)      attributes N, K, bits, block_size
//
// X float32 [..., K], W uint8 [N, blocks, block_size · bits / 8], S float32 [N, blocks] (or as many
// in one row), Y float32 [..., N]: the inputs and layout of com.microsoft MatMulNBits without zero
// points. See product.h for the arithmetic.
#include <onnxruntime_c_api.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "product.h"
#include "selftest.h"

#if defined(_WIN32)
#define HEADPORT_EXPORT __declspec(dllexport)
#else
#define HEADPORT_EXPORT __attribute__((visibility("default")))
#endif

namespace headport::kernels {
namespace {

constexpr std::uint32_t kOldestApi = 17;  // has KernelContext_ParallelFor
constexpr std::int64_t kTileBytes = 1 << 16;  // of weights: a thread's share at a time
constexpr std::int64_t kRowsAlone = 16;  // fewer rows of x are rounded by one thread

const OrtApi* api = nullptr;

// What failed, once ONNX Runtime's own status is released.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void check(OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = api->GetErrorMessage(status);
  api->ReleaseStatus(status);
  throw Failure(message);
}

// Runs what may throw on behalf of a C caller.
template <typename Work>
OrtStatus* guarded(Work&& work) {
  try {
    work();
    return nullptr;
  } catch (const std::exception& fault) {
    return api->CreateStatus(ORT_FAIL, (std::string("BlockMatMul: ") + fault.what()).c_str());
  }
}

std::int64_t attribute(const OrtKernelInfo* info, const char* name) {
  std::int64_t value = 0;
  check(api->KernelInfoGetAttribute_int64(info, name, &value));
  return value;
}

Form read_form(const OrtKernelInfo* info) {
  const Form form{attribute(info, "N"), attribute(info, "K"), attribute(info, "block_size"),
                  static_cast<int>(attribute(info, "bits"))};
  const bool sizes = form.N > 0 && form.K > 0;
  const bool block = form.block >= kGroup && form.block <= 256 && form.block % kGroup == 0;
  if (!sizes || !block || (form.bits != 4 && form.bits != 8))
    throw Failure("N and K above 0, bits 4 or 8 and a block_size of 32 to 256 were expected; N " +
                  std::to_string(form.N) + ", K " + std::to_string(form.K) + ", bits " +
                  std::to_string(form.bits) + ", block_size " + std::to_string(form.block) +
                  " were found");
  return form;
}

std::vector<std::int64_t> dims_of(const OrtValue* value) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api->GetTensorTypeAndShape(value, &info));
  std::size_t count = 0;
  OrtStatus* status = api->GetDimensionsCount(info, &count);
  std::vector<std::int64_t> dims(count);
  if (status == nullptr) status = api->GetDimensions(info, dims.data(), count);
  api->ReleaseTensorTypeAndShapeInfo(info);
  check(status);
  return dims;
}

std::int64_t product_of(const std::vector<std::int64_t>& dims) {
  std::int64_t product = 1;
  for (const std::int64_t dim : dims) product *= dim;
  return product;
}

// An input whose bytes are `count` elements, whatever its dimensions.
template <typename T>
const T* read_input(const OrtKernelContext* context, std::size_t index, std::int64_t count,
                    const char* name) {
  const OrtValue* value = nullptr;
  check(api->KernelContext_GetInput(context, index, &value));
  const std::int64_t found = product_of(dims_of(value));
  if (found != count)
    throw Failure(std::string(name) + " of " + std::to_string(count) +
                  " elements was expected, " + std::to_string(found) + " were found");
  void* data = nullptr;
  check(api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  return static_cast<const T*>(data);
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
    if (step.size() < blocks) step.resize(blocks), offset.resize(blocks);
    return {q.data(), step.data(), offset.data()};
  }
};

struct Share {
  const Kernel& kernel;
  const Operands& operands;
  std::int64_t size;  // rows of x or of the weight
};

void round_share(void* given, std::size_t index) {
  const Share& share = *static_cast<const Share*>(given);
  const std::int64_t from = static_cast<std::int64_t>(index) * share.size;
  share.kernel.round(share.operands, from, std::min(from + share.size, share.operands.rows));
}

void multiply_share(void* given, std::size_t index) {
  const Share& share = *static_cast<const Share*>(given);
  const std::int64_t from = static_cast<std::int64_t>(index) * share.size;
  share.kernel.multiply(share.operands, from,
                        std::min(from + share.size, share.operands.form.N));
}

void in_parallel(const OrtKernelContext* context, void (*work)(void*, std::size_t),
                 std::int64_t total, Share share) {
  const std::int64_t shares = (total + share.size - 1) / share.size;
  check(api->KernelContext_ParallelFor(context, work, static_cast<std::size_t>(shares), 0, &share));
}

struct BlockMatMul {
  Form form;
  const Kernel& kernel;

  void compute(OrtKernelContext* context) const {
    const OrtValue* x = nullptr;
    check(api->KernelContext_GetInput(context, 0, &x));
    std::vector<std::int64_t> dims = dims_of(x);
    if (dims.empty() || dims.back() != form.K)
      throw Failure("X [..., " + std::to_string(form.K) + "] was expected, its last dimension is " +
                    (dims.empty() ? std::string("missing") : std::to_string(dims.back())));
    const std::int64_t rows = product_of(dims) / form.K;
    dims.back() = form.N;
    OrtValue* y = nullptr;
    check(api->KernelContext_GetOutput(context, 0, dims.data(), dims.size(), &y));
    if (rows == 0) return;
    thread_local Scratch scratch;
    Operands operands;
    operands.form = form;
    operands.rows = rows;
    operands.x = read_input<float>(context, 0, rows * form.K, "X");
    operands.weight = read_input<std::uint8_t>(context, 1, form.N * form.row_bytes(), "W");
    operands.scale = read_input<float>(context, 2, form.N * form.blocks(), "S");
    operands.rounded = scratch.sized(form, rows);
    void* data = nullptr;
    check(api->GetTensorMutableData(y, &data));
    operands.y = static_cast<float*>(data);
    if (rows < kRowsAlone)
      kernel.round(operands, 0, rows);
    else
      in_parallel(context, round_share, rows, {kernel, operands, kRowsAlone});
    const std::int64_t size = std::max<std::int64_t>(2, kTileBytes / form.row_bytes() / 2 * 2);
    in_parallel(context, multiply_share, form.N, {kernel, operands, size});
  }
};

OrtStatus* create(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
  return guarded([&] { *kernel = new BlockMatMul{read_form(info), find_kernel()}; });
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  return guarded([&] { static_cast<const BlockMatMul*>(kernel)->compute(context); });
}

struct Operator : OrtCustomOp {
  Operator() : OrtCustomOp{} {
    version = ORT_API_VERSION;
    GetName = [](const OrtCustomOp*) { return "BlockMatMul"; };
    GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    GetInputTypeCount = [](const OrtCustomOp*) -> std::size_t { return 3; };
    GetInputType = [](const OrtCustomOp*, std::size_t index) {
      return index == 1 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    };
    GetInputCharacteristic = [](const OrtCustomOp*, std::size_t) {
      return OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_REQUIRED;
    };
    GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return OrtMemTypeDefault; };
    GetOutputTypeCount = [](const OrtCustomOp*) -> std::size_t { return 1; };
    GetOutputType = [](const OrtCustomOp*, std::size_t) {
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    };
    GetOutputCharacteristic = GetInputCharacteristic;
    CreateKernelV2 = create;
    KernelComputeV2 = compute;
    KernelDestroy = [](void* kernel) { delete static_cast<BlockMatMul*>(kernel); };
  }
};

void add_operators(OrtSessionOptions* options) {
  static const Operator block_matmul;
  static OrtCustomOpDomain* const domain = [] {
    OrtCustomOpDomain* made = nullptr;
    check(api->CreateCustomOpDomain("headport.kernels", &made));
    check(api->CustomOpDomain_Add(made, &block_matmul));
    return made;
  }();
  check(api->AddCustomOpDomain(options, domain));
}

}  // namespace
}  // namespace headport::kernels

// ONNX Runtime calls it when the library is registered with a session's options.
extern "C" HEADPORT_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                        const OrtApiBase* base) {
  using namespace headport::kernels;
  for (std::uint32_t version = ORT_API_VERSION; api == nullptr && version >= kOldestApi; --version)
    api = base->GetApi(version);
  if (api == nullptr) return nullptr;  // nothing is registered, so its operators are refused
  return guarded([&] {
    static const std::string fault = find_fault(find_kernel());
    if (!fault.empty()) throw Failure("the self-test failed: " + fault);
    add_operators(options);
  });
}

// The form of operators and weights; a manifest names the one its graphs were made for.
extern "C" HEADPORT_EXPORT int headport_kernels_version() { return 1; }

extern "C" HEADPORT_EXPORT const char* headport_kernels_name() {
  return headport::kernels::find_kernel().name;
}
