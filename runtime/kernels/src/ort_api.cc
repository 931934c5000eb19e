#include "ort_api.h"

namespace headport::kernels {

const OrtApi* api = nullptr;

void check(OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = api->GetErrorMessage(status);
  api->ReleaseStatus(status);
  throw Failure(message);
}

std::int64_t whole_attribute(const OrtKernelInfo* info, const char* name) {
  std::int64_t value = 0;
  check(api->KernelInfoGetAttribute_int64(info, name, &value));
  return value;
}

float real_attribute(const OrtKernelInfo* info, const char* name) {
  float value = 0;
  check(api->KernelInfoGetAttribute_float(info, name, &value));
  return value;
}

std::string text_attribute(const OrtKernelInfo* info, const char* name) {
  std::size_t size = 0;  // with the zero at its end
  check(api->KernelInfoGetAttribute_string(info, name, nullptr, &size));
  std::string value(size, '\0');
  check(api->KernelInfoGetAttribute_string(info, name, value.data(), &size));
  value.resize(size == 0 ? 0 : size - 1);
  return value;
}

const OrtValue* find_input(const OrtKernelContext* context, std::size_t index) {
  const OrtValue* value = nullptr;
  check(api->KernelContext_GetInput(context, index, &value));
  return value;
}

const OrtValue* find_constant(const OrtKernelInfo* info, std::size_t index) {
  std::size_t count = 0;
  check(api->KernelInfo_GetInputCount(info, &count));
  if (index >= count) return nullptr;
  int is_constant = 0;
  const OrtValue* value = nullptr;
  check(api->KernelInfoGetConstantInput_tensor(info, index, &is_constant, &value));
  return is_constant != 0 ? value : nullptr;
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

OrtValue* make_output(OrtKernelContext* context, std::size_t index,
                      const std::vector<std::int64_t>& dims) {
  OrtValue* value = nullptr;
  check(api->KernelContext_GetOutput(context, index, dims.data(), dims.size(), &value));
  return value;
}

float* find_output(OrtKernelContext* context, std::size_t index,
                   const std::vector<std::int64_t>& dims) {
  OrtValue* value = make_output(context, index, dims);
  return value == nullptr ? nullptr : data_of<float>(value);
}

}  // namespace headport::kernels
