#include "bundle/ledger.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "error.h"

namespace headport::internal {
namespace {

template <typename T>
T loaded(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

double from_bfloat(std::uint16_t bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float value = 0.0f;
  std::memcpy(&value, &wide, sizeof value);
  return static_cast<double>(value);
}

struct Element {
  const char* name;
  std::size_t bytes;
  double (*read)(const char*);
};

constexpr Element kElements[] = {
    {"float", 4, [](const char* p) { return static_cast<double>(loaded<float>(p)); }},
    {"float16", 2, [](const char* p) { return from_half(loaded<std::uint16_t>(p)); }},
    {"bfloat16", 2, [](const char* p) { return from_bfloat(loaded<std::uint16_t>(p)); }},
    {"double", 8, [](const char* p) { return loaded<double>(p); }},
    {"int8", 1, [](const char* p) { return static_cast<double>(loaded<std::int8_t>(p)); }},
    {"uint8", 1, [](const char* p) { return static_cast<double>(loaded<std::uint8_t>(p)); }},
};

const Element* element_of(const std::string& dtype) {
  for (const Element& each : kElements) {
    if (dtype == each.name) return &each;
  }
  return nullptr;
}

}  // namespace

double from_half(std::uint16_t half) {
  const int exponent = (half >> 10) & 0x1F, fraction = half & 0x3FF;
  double value = 0.0;
  if (exponent == 31) {
    value = fraction == 0 ? HUGE_VAL : std::nan("");
  } else if (exponent == 0) {
    value = std::ldexp(fraction, -24);
  } else {
    value = std::ldexp(1024 + fraction, exponent - 25);
  }
  return (half & 0x8000) != 0 ? -value : value;
}

std::uint16_t to_half(double value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::min(std::abs(value), 65504.0);
  if (!(size > 0.0)) return sign;
  int exponent = 0;
  std::frexp(size, &exponent);  // size = f · 2^exponent, 1/2 ≤ f < 1
  const int step = std::max(exponent - 11, -24);
  const auto units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(size, -step)));
  // Units of 2^step: the low bits of a number of that exponent, or of one below the normal range.
  const std::uint32_t bits = static_cast<std::uint32_t>(step + 24) * 1024u + units;
  return static_cast<std::uint16_t>(sign | bits);
}

const Tensor& find_tensor(const Manifest& manifest, const std::string& graph,
                          const std::string& initializer) {
  const std::string consumer = graph + ":" + initializer;
  for (const Tensor& tensor : manifest.tensors) {
    const auto& names = tensor.consumers;
    if (std::find(names.begin(), names.end(), consumer) != names.end()) return tensor;
  }
  throw Error(HEADPORT_BUNDLE_ERROR, text("the tensor ledger has no entry for ", consumer));
}

RowReader::RowReader(const Bundle& bundle, const Tensor& tensor)
    : where_(text(bundle.path().string(), ": tensor ", tensor.name)),
      dtype_(tensor.dtype),
      offset_(static_cast<std::size_t>(tensor.offset)),
      rows_(0),
      width_(1),
      element_(0),
      stream_(bundle.file(tensor.file), std::ios::binary) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  const Element* element = element_of(dtype_);
  bool sound = element != nullptr && !tensor.shape.empty() && tensor.offset >= 0;
  for (std::size_t n = 0; sound && n < tensor.shape.size(); ++n) {
    sound = tensor.shape[n] >= 1 && tensor.shape[n] <= kMost;
    if (!sound) break;
    if (n == 0) rows_ = static_cast<std::size_t>(tensor.shape[0]);
    else width_ *= static_cast<std::size_t>(tensor.shape[n]);
    sound = width_ <= static_cast<std::size_t>(kMost);
  }
  if (sound) element_ = element->bytes;
  if (!sound || rows_ * width_ * element_ != static_cast<std::size_t>(tensor.length)) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(where_, ": a known element type and a length that fits the shape were expected, "
                     "type ", dtype_, " and ", tensor.length, " bytes were found"));
  }
  bytes_.resize(width_ * element_);
}

void RowReader::read(std::size_t row, std::vector<double>& values) {
  const auto size = static_cast<std::streamsize>(bytes_.size());
  stream_.seekg(static_cast<std::streamoff>(offset_ + row * bytes_.size()));
  if (row >= rows_ || !stream_.read(bytes_.data(), size)) {
    throw Error(HEADPORT_BUNDLE_ERROR, text(where_, ": row ", row, " cannot be read"));
  }
  const Element& element = *element_of(dtype_);
  values.resize(width_);
  for (std::size_t n = 0; n < width_; ++n) values[n] = element.read(bytes_.data() + n * element_);
}

}  // namespace headport::internal
