// Memory that is kept from call to call and grows as needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace headport::kernels {

// Begins at a cache line: a register that is read across two lines takes twice as long.
template <typename T>
class Scratch {
 public:
  // Room for `count` values, which are not kept where it grows.
  T* sized(std::int64_t count) {
    const auto needed = static_cast<std::size_t>(count) * sizeof(T) + kLine;
    if (needed > bytes_) {
      memory_ = std::make_unique<std::byte[]>(needed);
      bytes_ = needed;
    }
    void* begin = memory_.get();
    std::size_t space = bytes_;
    return static_cast<T*>(std::align(kLine, needed - kLine, begin, space));
  }

 private:
  static constexpr std::size_t kLine = 64;
  std::unique_ptr<std::byte[]> memory_;
  std::size_t bytes_ = 0;
};

}  // namespace headport::kernels
