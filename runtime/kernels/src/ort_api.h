// The little of ONNX Runtime's C API that operators need.
#pragma once

#include <onnxruntime_c_api.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace headport::kernels {

// Set when the library is registered, before any operator is made.
extern const OrtApi* api;

// What failed, once ONNX Runtime's own status is released.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void check(OrtStatus* status);

// Runs what may throw on behalf of a C caller.
template <typename Work>
OrtStatus* guarded(const char* name, Work&& work) {
  try {
    work();
    return nullptr;
  } catch (const std::exception& fault) {
    return api->CreateStatus(ORT_FAIL, (std::string(name) + ": " + fault.what()).c_str());
  }
}

std::int64_t whole_attribute(const OrtKernelInfo* info, const char* name);
float real_attribute(const OrtKernelInfo* info, const char* name);
std::string text_attribute(const OrtKernelInfo* info, const char* name);

// Null where an optional input is left out.
const OrtValue* find_input(const OrtKernelContext* context, std::size_t index);
const OrtValue* find_constant(const OrtKernelInfo* info, std::size_t index);
std::vector<std::int64_t> dims_of(const OrtValue* value);
std::int64_t product_of(const std::vector<std::int64_t>& dims);
OrtValue* make_output(OrtKernelContext* context, std::size_t index,
                      const std::vector<std::int64_t>& dims);

// Null where an optional output is left out; else float32.
float* find_output(OrtKernelContext* context, std::size_t index,
                   const std::vector<std::int64_t>& dims);

template <typename T>
T* data_of(OrtValue* value) {
  void* data = nullptr;
  check(api->GetTensorMutableData(value, &data));
  return static_cast<T*>(data);
}

template <typename T>
const T* data_of(const OrtValue* value) {
  return data_of<T>(const_cast<OrtValue*>(value));  // the C API has no other way to read
}

// The data of a value whose bytes are `count` elements, whatever its dimensions; null is none.
template <typename T>
const T* elements_of(const OrtValue* value, std::int64_t count, const char* name) {
  const std::int64_t found = value == nullptr ? 0 : product_of(dims_of(value));
  if (value == nullptr || found != count)
    throw Failure(std::string(name) + " of " + std::to_string(count) +
                  " elements was expected, " + std::to_string(found) + " were found");
  return data_of<T>(value);
}

template <typename T>
const T* read_input(const OrtKernelContext* context, std::size_t index, std::int64_t count,
                    const char* name) {
  return elements_of<T>(find_input(context, index), count, name);
}

// An input that never changes, so that no call has to look for it again; null where it may.
template <typename T>
const T* constant_input(const OrtKernelInfo* info, std::size_t index, std::int64_t count,
                        const char* name) {
  const OrtValue* value = find_constant(info, index);
  return value == nullptr ? nullptr : elements_of<T>(value, count, name);
}

// work(i) for every i below `total`, by the session's threads. What it throws, which is want of
// memory, may not cross their C code and is thrown again here.
template <typename Work>
void in_parallel(const OrtKernelContext* context, std::int64_t total, const Work& work) {
  struct Job {
    const Work& work;
    std::atomic<bool> failed{false};
  } job{work};
  const auto call = [](void* given, std::size_t index) {
    Job& mine = *static_cast<Job*>(given);
    try {
      mine.work(static_cast<std::int64_t>(index));
    } catch (...) {
      mine.failed = true;
    }
  };
  check(api->KernelContext_ParallelFor(context, call, static_cast<std::size_t>(total), 0, &job));
  if (job.failed) throw Failure("a thread ran out of memory");
}

const OrtCustomOp* block_matmul();
const OrtCustomOp* cached_attention();
const OrtCustomOp* ranked_candidates();

}  // namespace headport::kernels
