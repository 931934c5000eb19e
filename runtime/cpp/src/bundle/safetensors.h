// The tensors of a safetensors file.
// Source of the format: the README of huggingface/safetensors.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace headport::internal {

struct StoredTensor {
  std::string dtype;  // as the format names it: F32, F16 …
  std::vector<std::size_t> shape;
  std::size_t first = 0, size = 0;  // bytes of the file
};

// `data` is the whole file, `where` names it in messages.
// Errors: HEADPORT_BUNDLE_ERROR if it is no such file, or has no tensor of this name.
StoredTensor find_stored(const std::string& data, const std::string& name,
                         const std::string& where);
// All of them, by name. Errors: as above.
std::map<std::string, StoredTensor> all_stored(const std::string& data, const std::string& where);

}  // namespace headport::internal
