#include <string>

#include "bundle/manifest.h"
#include "error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    headport::internal::read_manifest({reinterpret_cast<const char*>(data), size}, "fuzzed");
  } catch (const headport::internal::Error&) {  // what is refused is refused with this alone
  }
  return 0;
}
