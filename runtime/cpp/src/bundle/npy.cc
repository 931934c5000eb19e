#include "bundle/npy.h"

#include <cstring>

#include "error.h"

namespace headport::internal {
namespace {

constexpr char kMagic[] = "\x93NUMPY";
constexpr std::size_t kMagicSize = 6;

// The header is a Python dictionary with three keys in any order. It is read as if written by NumPy:
// {'descr': '<i4', 'fortran_order': False, 'shape': (7,), }
class Header {
 public:
  explicit Header(const std::string& source) : source_(source) {}

  // The length of the one axis, or nothing where it is no such header.
  bool read(std::uint64_t& length) {
    bool descr = false, order = false, shape = false;
    if (!take("{")) return false;
    while (!take("}")) {
      if (take("'descr'")) {
        descr = take(":") && take("'<i4'");
        if (!descr) return false;
      } else if (take("'fortran_order'")) {
        order = take(":") && (take("False") || take("True"));  // one axis: no difference
        if (!order) return false;
      } else if (take("'shape'")) {
        shape = take(":") && take("(") && number(length) && take(",") && take(")");
        if (!shape) return false;
      } else {
        return false;
      }
      take(",");
    }
    skip();
    return descr && order && shape && place_ == source_.size();
  }

 private:
  void skip() {
    while (place_ < source_.size() && (source_[place_] == ' ' || source_[place_] == '\n')) ++place_;
  }
  bool take(const char* word) {
    skip();
    const std::size_t size = std::strlen(word);
    if (source_.compare(place_, size, word) != 0) return false;
    place_ += size;
    return true;
  }
  bool number(std::uint64_t& value) {
    skip();
    const std::size_t first = place_;
    value = 0;
    while (place_ < source_.size() && source_[place_] >= '0' && source_[place_] <= '9') {
      if (place_ - first >= 18) return false;
      value = value * 10 + static_cast<std::uint64_t>(source_[place_] - '0');
      ++place_;
    }
    return place_ > first;
  }

  const std::string& source_;
  std::size_t place_ = 0;
};

std::uint64_t little_endian(const std::string& data, std::size_t place, std::size_t bytes) {
  std::uint64_t value = 0;
  for (std::size_t n = 0; n < bytes; ++n) {
    value |= std::uint64_t{static_cast<unsigned char>(data[place + n])} << (8 * n);
  }
  return value;
}

}  // namespace

std::vector<std::int32_t> read_npy_int32(const std::string& data, const std::string& where) {
  const auto refuse = [&](const char* fault) {
    return Error(HEADPORT_BUNDLE_ERROR,
                 text(where, ": an int32 array [N] in NumPy's format was expected; ", fault));
  };
  if (data.size() < kMagicSize + 2 || data.compare(0, kMagicSize, kMagic, kMagicSize) != 0) {
    throw refuse("it does not begin as one");
  }
  const int version = static_cast<unsigned char>(data[kMagicSize]);
  if (version < 1 || version > 3) throw refuse("its version is not from 1 to 3");
  const std::size_t size_bytes = version == 1 ? 2 : 4;
  const std::size_t first = kMagicSize + 2 + size_bytes;
  if (data.size() < first) throw refuse("its header is cut off");
  const std::uint64_t header_size = little_endian(data, kMagicSize + 2, size_bytes);
  if (header_size > data.size() - first) throw refuse("its header is cut off");
  const std::string source = data.substr(first, static_cast<std::size_t>(header_size));
  std::uint64_t length = 0;
  if (!Header(source).read(length)) throw refuse("its header says something else");
  const std::size_t body = first + static_cast<std::size_t>(header_size);
  if (data.size() - body != length * 4) throw refuse("its size is not what its header says");
  std::vector<std::int32_t> found(static_cast<std::size_t>(length));
  for (std::size_t n = 0; n < found.size(); ++n) {
    found[n] = static_cast<std::int32_t>(little_endian(data, body + 4 * n, 4));
  }
  return found;
}

}  // namespace headport::internal
