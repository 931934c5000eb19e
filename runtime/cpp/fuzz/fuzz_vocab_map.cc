#include <string>

#include "bundle/npy.h"
#include "bundle/vocabulary.h"
#include "error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headport::internal;
  try {
    IdMap(1000, read_npy_int32({reinterpret_cast<const char*>(data), size}, "fuzzed"), "fuzzed");
  } catch (const Error&) {
  }
  return 0;
}
