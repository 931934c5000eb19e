// Which tokenizers the encoder's library gives the right ids for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace headport::internal {

// Special tokens that a tokenizer puts around every text.
struct Surroundings {
  std::vector<std::int64_t> before;
  std::vector<std::int64_t> after;
};

// `source` is a `tokenizer.json`.
// Errors: HEADPORT_UNSUPPORTED, naming what about it was not compared with Python, or was found to
// differ; HEADPORT_BUNDLE_ERROR if it is none.
Surroundings check_encodable(const std::string& source, const std::string& where);

}  // namespace headport::internal
