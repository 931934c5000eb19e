// An operator as ONNX Runtime is told of it, from what its kernel says of itself.
#pragma once

#include "ort_api.h"

namespace headport::kernels {

// A Kernel has kName, kInputCount and kOutputCount, input_type(index), is_optional_input(index),
// is_optional_output(index), output_type(index), a constructor from OrtKernelInfo and
// compute(context).
template <typename Kernel>
struct Operator : OrtCustomOp {
  Operator() : OrtCustomOp{} {
    version = ORT_API_VERSION;
    GetName = [](const OrtCustomOp*) { return Kernel::kName; };
    GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    GetInputTypeCount = [](const OrtCustomOp*) -> std::size_t { return Kernel::kInputCount; };
    GetInputType = [](const OrtCustomOp*, std::size_t index) { return Kernel::input_type(index); };
    GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return OrtMemTypeDefault; };
    GetInputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
      return characteristic(Kernel::is_optional_input(index));
    };
    GetOutputTypeCount = [](const OrtCustomOp*) -> std::size_t { return Kernel::kOutputCount; };
    GetOutputType = [](const OrtCustomOp*, std::size_t index) {
      return Kernel::output_type(index);
    };
    GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
      return characteristic(Kernel::is_optional_output(index));
    };
    CreateKernelV2 = [](const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info, void** made) {
      return guarded(Kernel::kName, [&] { *made = new Kernel(info); });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      return guarded(Kernel::kName, [&] { static_cast<const Kernel*>(kernel)->compute(context); });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  }

 private:
  static OrtCustomOpInputOutputCharacteristic characteristic(bool optional) {
    return optional ? OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_OPTIONAL
                    : OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_REQUIRED;
  }
};

}  // namespace headport::kernels
