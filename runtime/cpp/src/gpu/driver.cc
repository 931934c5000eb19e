#include "gpu/driver.h"

#include <dlfcn.h>

#include "error.h"

namespace headport::internal {
namespace {

constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76;  // CUdevice_attribute
constexpr const char* kInstead =
    "; run the bundle that the plans were built of on ONNX Runtime instead: `headport lower --target "
    "ort-cpu`";

template <typename Function>
void find(void* handle, const std::string& library, const char* name, Function*& function) {
  void* symbol = dlsym(handle, name);
  if (symbol == nullptr) {
    throw Error(HEADPORT_NO_GPU, text("an NVIDIA driver of CUDA 11 or newer was expected, ", library,
                                      " without ", name, " was found; install a newer driver",
                                      kInstead));
  }
  function = reinterpret_cast<Function*>(symbol);
}

}  // namespace

DriverApi load_driver(const std::string& library) {
  // Never unloaded: it has threads of its own.
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* fault = dlerror();
    throw Error(HEADPORT_NO_GPU,
                text("TensorRT plans run on a GPU; the NVIDIA driver, ", library, ", was looked for "
                     "and cannot be loaded (", fault != nullptr ? fault : "no reason is given",
                     "); install it on a machine with an NVIDIA GPU", kInstead));
  }
  DriverApi found{};
  find(handle, library, "cuInit", found.init);
  find(handle, library, "cuDeviceGetCount", found.device_count);
  find(handle, library, "cuDeviceGet", found.device_get);
  find(handle, library, "cuDeviceGetName", found.device_name);
  find(handle, library, "cuDeviceGetAttribute", found.device_attribute);
  find(handle, library, "cuDevicePrimaryCtxRetain", found.context_retain);
  find(handle, library, "cuDevicePrimaryCtxRelease_v2", found.context_release);
  find(handle, library, "cuCtxSetCurrent", found.context_use);
  find(handle, library, "cuStreamCreate", found.stream_create);
  find(handle, library, "cuStreamDestroy_v2", found.stream_destroy);
  find(handle, library, "cuStreamSynchronize", found.stream_wait);
  find(handle, library, "cuMemAlloc_v2", found.allocate);
  find(handle, library, "cuMemFree_v2", found.free);
  find(handle, library, "cuMemcpyHtoDAsync_v2", found.upload);
  find(handle, library, "cuMemcpyDtoHAsync_v2", found.download);
  return found;
}

Gpu find_gpu(const DriverApi& driver) {
  const int status = driver.init(0);
  if (status != 0) {
    throw Error(HEADPORT_NO_GPU,
                text("TensorRT plans run on a GPU, and the NVIDIA driver does not start (cuInit "
                     "gives ", status, "); `nvidia-smi` says why", kInstead));
  }
  int count = 0, device = 0, major = 0, minor = 0;
  char name[256] = {};
  if (driver.device_count(&count) != 0 || count < 1) {
    throw Error(HEADPORT_NO_GPU, text("TensorRT plans run on a GPU, and the NVIDIA driver knows none; "
                                      "CUDA_VISIBLE_DEVICES may hide it", kInstead));
  }
  const bool known = driver.device_get(&device, 0) == 0 &&
                     driver.device_name(name, sizeof name - 1, device) == 0 &&
                     driver.device_attribute(&major, kCapabilityMajor, device) == 0 &&
                     driver.device_attribute(&minor, kCapabilityMinor, device) == 0;
  if (!known) {
    throw Error(HEADPORT_NO_GPU,
                text("TensorRT plans run on a GPU, and the NVIDIA driver does not say what the first "
                     "one is; `nvidia-smi` says why", kInstead));
  }
  return {name, text("SM", major, minor)};
}

}  // namespace headport::internal
