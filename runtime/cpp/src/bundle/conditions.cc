#include "bundle/conditions.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bundle/safetensors.h"
#include "error.h"

namespace headport::internal {
namespace {

// src/headport/condition.py has the same names.
constexpr const char* kFile = "condition.safetensors";
constexpr const char* kWeight = "weight";
constexpr const char* kBias = "bias";
constexpr const char* kFixed = "fixed.";
constexpr std::uintmax_t kFileBytes = std::uintmax_t{1} << 31;

[[noreturn]] void refuse(const std::string& where, const std::string& fault) {
  throw Error(HEADPORT_BUNDLE_ERROR, text(where, ": ", fault));
}

std::vector<float> floats_of(const std::string& data, const std::string& name,
                             const StoredTensor& tensor, const std::string& where) {
  if (tensor.dtype != "F32") {
    throw Error(HEADPORT_UNSUPPORTED, text(where, ": float32 was expected of ", name, ", ",
                                           tensor.dtype, " was found; save it as float32"));
  }
  std::vector<float> found(tensor.size / sizeof(float));
  if (!found.empty()) std::memcpy(found.data(), data.data() + tensor.first, tensor.size);
  const bool sound = std::all_of(found.begin(), found.end(), [](float v) { return std::isfinite(v); });
  if (!sound) refuse(where, name + " holds NaN or infinity");
  return found;
}

}  // namespace

Conditions::Conditions(const std::string& data, const std::string& where,
                       std::int64_t hidden_size) {
  std::map<std::string, StoredTensor> tensors = all_stored(data, where);
  const auto weight = tensors.find(kWeight), bias = tensors.find(kBias);
  const bool fits = weight != tensors.end() && bias != tensors.end() &&
                    weight->second.shape.size() == 2 && bias->second.shape.size() == 1 &&
                    bias->second.shape[0] == weight->second.shape[0];
  if (!fits) {
    refuse(where, "weight [hidden size, condition size] and bias [hidden size] were expected; write "
                  "it with headport.export.heads.save_condition");
  }
  hidden_size_ = weight->second.shape[0];
  size_ = weight->second.shape[1];
  if (static_cast<std::int64_t>(hidden_size_) != hidden_size) {
    refuse(where, text("it is for hidden states of ", hidden_size_, " values, the model gives ",
                       hidden_size, "; it was trained with another model"));
  }
  weight_ = floats_of(data, kWeight, weight->second, where);
  bias_ = floats_of(data, kBias, bias->second, where);
  const std::size_t prefix = std::strlen(kFixed);
  for (const auto& [name, tensor] : tensors) {
    if (name == kWeight || name == kBias) continue;
    const bool sound = name.compare(0, prefix, kFixed) == 0 && name.size() > prefix &&
                       tensor.shape == std::vector<std::size_t>{size_};
    if (!sound) {
      refuse(where, text(name, ": ", kFixed, "NAME [", size_, "] was expected of every fixed "
                         "condition"));
    }
    stored_[name.substr(prefix)] = floats_of(data, name, tensor, where);
  }
}

std::optional<Conditions> Conditions::from_bundle(const Bundle& bundle) {
  if (bundle.manifest().files.count(kFile) == 0) return std::nullopt;
  const auto path = bundle.file(kFile);
  return Conditions(read_file(path, kFileBytes), path.string(), bundle.manifest().hidden_size);
}

std::vector<std::string> Conditions::names() const {
  std::vector<std::string> found;
  for (const auto& [name, _] : stored_) found.push_back(name);
  return found;
}

std::string Conditions::known() const {
  std::string found;
  for (const auto& [name, _] : stored_) found += (found.empty() ? "" : ", ") + name;
  return found;
}

void Conditions::require_name(const std::string& name) const {
  if (stored_.count(name) > 0) return;
  throw Error(HEADPORT_REQUEST_ERROR, text("no condition '", name, "' in this bundle; known are ",
                                           stored_.empty() ? "none" : known()));
}

void Conditions::require_values(Span<float> values) const {
  if (values.size != size_) {
    throw Error(HEADPORT_REQUEST_ERROR,
                text("a condition is a name (", stored_.empty() ? "none is stored" : known(), ") or ",
                     size_, " numbers, ", values.size, " were given"));
  }
  for (const float each : values) {
    if (std::isfinite(each)) continue;
    throw Error(HEADPORT_REQUEST_ERROR,
                text("a condition's values must be finite, ", each, " was given"));
  }
}

const std::vector<float>& Conditions::vector(const std::string& name) {
  require_name(name);
  const auto found = vectors_.find(name);
  if (found != vectors_.end()) return found->second;
  return vectors_[name] = product(stored_.at(name).data());
}

std::vector<float> Conditions::vector(Span<float> values) {
  require_values(values);
  return product(values.data);
}

// Summed in float64: NumPy's order is its library's own, so float32 rounding is all that differs.
std::vector<float> Conditions::product(const float* values) {
  ++computed_;
  std::vector<float> found(hidden_size_);
  for (std::size_t row = 0; row < hidden_size_; ++row) {
    double sum = 0.0;
    for (std::size_t n = 0; n < size_; ++n) {
      sum += static_cast<double>(weight_[row * size_ + n]) * static_cast<double>(values[n]);
    }
    found[row] = static_cast<float>(sum + static_cast<double>(bias_[row]));
  }
  return found;
}

}  // namespace headport::internal
