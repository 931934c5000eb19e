// A `tokenizer.json` of a stranger, and ids that it may not have.
#include <string>

#include "error.h"
#include "text/encodable.h"
#include "text/texts.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headport::internal;
  const std::string source(reinterpret_cast<const char*>(data), size);
  try {
    const Texts texts(source, "fuzzed");
    const std::vector<std::int64_t> ids = {0, 1, 2, -1, 3, 1 << 30};
    texts.decode(ids);
  } catch (const Error&) {
  }
  try {
    check_encodable(source, "fuzzed");
  } catch (const Error&) {
  }
  return 0;
}
