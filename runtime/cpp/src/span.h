// Memory that somebody else owns. C++17 has no std::span.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace headport::internal {

template <typename T>
struct Span {
  const T* data = nullptr;
  std::size_t size = 0;

  Span() = default;
  Span(const T* first, std::size_t count) : data(first), size(count) {}
  Span(const std::vector<T>& values) : data(values.data()), size(values.size()) {}  // NOLINT

  const T& operator[](std::size_t index) const { return data[index]; }
  const T* begin() const { return data; }
  const T* end() const { return data + size; }
  bool empty() const { return size == 0; }
};

using IdSpan = Span<std::int64_t>;

}  // namespace headport::internal
