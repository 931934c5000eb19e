// Memory of a GPU, and a stream of work on it. Mirrors runtime/tensorrt/device.py.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "gpu/driver.h"

namespace headport::internal {

// Where a plan runs. Work on it is done in the order in which it is given.
class Device {
 public:
  virtual ~Device() = default;

  // The handle that executions are given.
  virtual void* stream() const = 0;
  // At least one byte: libraries refuse null pointers, also for empty arrays.
  virtual void* allocate(std::size_t size) = 0;
  virtual void free(void* address) noexcept = 0;
  // Done when it returns: the source may go.
  virtual void upload(void* to, const void* from, std::size_t size) = 0;
  // Waits for all work before it.
  virtual void download(void* to, const void* from, std::size_t size) = 0;
};

// The first GPU. Plans share its primary context, which CUDA's runtime library uses as well.
// Errors of all: HEADPORT_LIBRARY_ERROR; HEADPORT_OUT_OF_MEMORY.
class CudaDevice final : public Device {
 public:
  // Only after `find_gpu` has found one with this driver.
  explicit CudaDevice(const DriverApi& driver);
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;
  ~CudaDevice() override;

  void* stream() const override { return stream_; }
  void* allocate(std::size_t size) override;
  void free(void* address) noexcept override;
  void upload(void* to, const void* from, std::size_t size) override;
  void download(void* to, const void* from, std::size_t size) override;

 private:
  void enter();
  void check(int status, const char* name) const;

  DriverApi driver_;
  int device_ = 0;
  void* context_ = nullptr;
  void* stream_ = nullptr;
};

// Blocks of one size, kept for those who come later. The pool must outlive its blocks.
class BlockPool {
 public:
  using Block = std::shared_ptr<void>;

  BlockPool(Device& device, std::size_t bytes) : device_(device), bytes_(bytes) {}
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;
  ~BlockPool();

  // Errors: as `Device::allocate`.
  Block get();
  std::size_t bytes() const { return bytes_; }

 private:
  Device& device_;
  std::size_t bytes_;
  std::size_t count_ = 0;  // blocks there are, lent or not
  std::vector<void*> free_;
};

}  // namespace headport::internal
