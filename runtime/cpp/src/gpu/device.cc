#include "gpu/device.h"

#include <new>

#include "error.h"

namespace headport::internal {
namespace {

constexpr int kOutOfMemory = 2;  // CUDA_ERROR_OUT_OF_MEMORY

std::uint64_t address_of(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace

CudaDevice::CudaDevice(const DriverApi& driver) : driver_(driver) {
  check(driver_.device_get(&device_, 0), "cuDeviceGet");
  check(driver_.context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  try {
    enter();
    check(driver_.stream_create(&stream_, 0), "cuStreamCreate");
  } catch (...) {
    driver_.context_release(device_);  // the destructor does not run for what was not constructed
    throw;
  }
}

CudaDevice::~CudaDevice() {
  driver_.context_use(context_);
  driver_.stream_destroy(stream_);
  driver_.context_release(device_);
}

// A context is current in one thread only, and any thread may call a generator.
void CudaDevice::enter() { check(driver_.context_use(context_), "cuCtxSetCurrent"); }

void CudaDevice::check(int status, const char* name) const {
  if (status == 0) return;
  if (status == kOutOfMemory) {
    throw Error(HEADPORT_OUT_OF_MEMORY,
                "the GPU's memory ran out; lower max_rows, max_context or the number of prompts");
  }
  throw Error(HEADPORT_LIBRARY_ERROR,
              text("the NVIDIA driver refuses ", name, ": CUDA error ", status));
}

void* CudaDevice::allocate(std::size_t size) {
  enter();
  std::uint64_t address = 0;
  check(driver_.allocate(&address, size > 0 ? size : 1), "cuMemAlloc");
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
}

void CudaDevice::free(void* address) noexcept {
  // Errors here are those of work before it, and nobody can act on them any more.
  driver_.context_use(context_);
  driver_.free(address_of(address));
}

void CudaDevice::upload(void* to, const void* from, std::size_t size) {
  if (size == 0) return;
  enter();
  check(driver_.upload(address_of(to), from, size, stream_), "cuMemcpyHtoDAsync");
  check(driver_.stream_wait(stream_), "cuStreamSynchronize");
}

void CudaDevice::download(void* to, const void* from, std::size_t size) {
  enter();
  if (size > 0) check(driver_.download(to, address_of(from), size, stream_), "cuMemcpyDtoHAsync");
  check(driver_.stream_wait(stream_), "cuStreamSynchronize");
}

BlockPool::~BlockPool() {
  for (void* each : free_) device_.free(each);
}

BlockPool::Block BlockPool::get() {
  if (free_.empty()) {
    free_.reserve(count_ + 1);  // so that a block that comes back always finds its place
    free_.push_back(device_.allocate(bytes_));
    ++count_;
  }
  void* block = free_.back();
  free_.pop_back();
  return Block(block, [this](void* address) { free_.push_back(address); });
}

}  // namespace headport::internal
