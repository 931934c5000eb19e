// NVIDIA's driver, loaded at run time. Its few functions that are used are declared here, so no CUDA
// header and no CUDA library is needed. Mirrors src/headport/gpu_probe.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace headport::internal {

// The functions of cuda.h that are used, results are CUDA's error numbers.
struct DriverApi {
  int (*init)(unsigned flags);
  int (*device_count)(int* count);
  int (*device_get)(int* device, int ordinal);
  int (*device_name)(char* name, int size, int device);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*context_retain)(void** context, int device);
  int (*context_release)(int device);
  int (*context_use)(void* context);
  int (*stream_create)(void** stream, unsigned flags);
  int (*stream_destroy)(void* stream);
  int (*stream_wait)(void* stream);
  int (*allocate)(std::uint64_t* address, std::size_t size);
  int (*free)(std::uint64_t address);
  int (*upload)(std::uint64_t to, const void* from, std::size_t size, void* stream);
  int (*download)(void* to, std::uint64_t from, std::size_t size, void* stream);
};

// The first GPU.
struct Gpu {
  std::string name;
  std::string compute_capability;  // as build records have it, such as SM89
};

// The driver's functions. Errors: HEADPORT_NO_GPU if it is not there or too old.
DriverApi load_driver(const std::string& library = "libcuda.so.1");

// Starts the driver and asks for a GPU. Errors: HEADPORT_NO_GPU if there is none.
Gpu find_gpu(const DriverApi& driver);

}  // namespace headport::internal
