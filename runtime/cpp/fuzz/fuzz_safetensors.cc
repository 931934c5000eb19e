#include <string>

#include "bundle/conditions.h"
#include "bundle/safetensors.h"
#include "error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headport::internal;
  const std::string file(reinterpret_cast<const char*>(data), size);
  try {
    const StoredTensor found = find_stored(file, "hidden_states", "fuzzed");
    if (found.first + found.size > file.size()) __builtin_trap();
  } catch (const Error&) {
  }
  try {
    Conditions found(file, "fuzzed", 2);
    for (const std::string& name : found.names()) {
      if (found.vector(name).size() != 2) __builtin_trap();
    }
  } catch (const Error&) {
  }
  return 0;
}
