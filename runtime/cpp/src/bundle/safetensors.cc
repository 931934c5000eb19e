#include "bundle/safetensors.h"

#include <nlohmann/json.hpp>

#include "error.h"

namespace headport::internal {
namespace {

using nlohmann::json;

constexpr std::size_t kPrefix = 8;  // bytes that hold the header's length
constexpr std::uint64_t kLongestHeader = 100'000'000;
constexpr int kDeepest = 8;
constexpr const char* kMetadata = "__metadata__";  // texts beside the tensors

[[noreturn]] void refuse(const std::string& where, const std::string& fault) {
  throw Error(HEADPORT_BUNDLE_ERROR,
              text(where, ": a safetensors file was expected; ", fault));
}

json header_of(const std::string& data, const std::string& where, std::size_t& body) {
  std::uint64_t length = 0;
  if (data.size() < kPrefix) refuse(where, "it is too short for one");
  for (std::size_t n = 0; n < kPrefix; ++n) {
    length |= std::uint64_t{static_cast<unsigned char>(data[n])} << (8 * n);
  }
  if (length > kLongestHeader || length > data.size() - kPrefix) {
    refuse(where, "its header is longer than the file, or than any");
  }
  body = kPrefix + static_cast<std::size_t>(length);
  const json found = json::parse(data.begin() + kPrefix,
                                 data.begin() + static_cast<std::ptrdiff_t>(body),
                                 [](int depth, json::parse_event_t, json&) { return depth <= kDeepest; },
                                 false);
  if (!found.is_object()) refuse(where, "its header is no JSON object");
  return found;
}

StoredTensor stored_of(const json& entry, const std::string& name, std::size_t body,
                       std::size_t file, const std::string& where) {
  static const std::map<std::string, std::size_t> kBytes = {
      {"BF16", 2}, {"BOOL", 1}, {"F16", 2}, {"F32", 4}, {"F64", 8},
      {"I16", 2},  {"I32", 4},  {"I64", 8}, {"I8", 1},  {"U8", 1}};
  try {
    StoredTensor tensor{entry.at("dtype"), {}, 0, 0};
    const auto bytes = kBytes.find(tensor.dtype);
    if (bytes == kBytes.end()) refuse(where, "the element type of " + name + " is not known");
    std::uint64_t size = bytes->second;
    for (const json& dimension : entry.at("shape")) {
      const auto each = dimension.is_number_unsigned() ? dimension.get<std::uint64_t>() : UINT64_MAX;
      if (each > file) refuse(where, "the shape of " + name + " is larger than the file");
      if (each > 0 && size > UINT64_MAX / each) refuse(where, "the shape of " + name + " overflows");
      size *= each;
      tensor.shape.push_back(static_cast<std::size_t>(each));
    }
    const json& offsets = entry.at("data_offsets");
    const auto number = [&](const json& value) {
      if (!value.is_number_unsigned()) refuse(where, "an offset of " + name + " is no whole number");
      return value.get<std::uint64_t>();
    };
    const std::uint64_t first = number(offsets.at(0)), last = number(offsets.at(1));
    if (first > last || last > file - body || last - first != size) {
      refuse(where, "the offsets of " + name + " do not fit its shape and the file");
    }
    tensor.first = body + static_cast<std::size_t>(first);
    tensor.size = static_cast<std::size_t>(size);
    return tensor;
  } catch (const json::exception& error) {
    refuse(where, text("the entry of ", name, " is wrong (", error.what(), ")"));
  }
}

}  // namespace

StoredTensor find_stored(const std::string& data, const std::string& name,
                         const std::string& where) {
  std::size_t body = 0;
  const json header = header_of(data, where, body);
  const auto found = header.find(name);
  if (found == header.end()) refuse(where, "no tensor " + name + " is in it");
  return stored_of(*found, name, body, data.size(), where);
}

std::map<std::string, StoredTensor> all_stored(const std::string& data, const std::string& where) {
  std::size_t body = 0;
  const json header = header_of(data, where, body);
  std::map<std::string, StoredTensor> found;
  for (const auto& [name, entry] : header.items()) {
    if (name != kMetadata) found[name] = stored_of(entry, name, body, data.size(), where);
  }
  return found;
}

}  // namespace headport::internal
