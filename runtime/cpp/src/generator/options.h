// The options struct of the C ABI ↔ what the generator works with.
#pragma once

#include <vector>

#include "generator/request.h"
#include "headport/headport.h"

namespace headport::internal {

// The lists of a bundle's defaults in the form of the C ABI, made once.
class DefaultLists {
 public:
  explicit DefaultLists(const Defaults& defaults);
  // Point the lists of some options here.
  void lend(headport_options& options) const;

 private:
  const Defaults& defaults_;
  std::vector<headport_bias> bias_;
  std::vector<headport_ids> bad_words_;
  std::vector<const char*> stop_;
};

// A bundle's defaults as options.
headport_options options_of(const Defaults& defaults, const DefaultLists& lists);

// Check a call's options.
// Errors: HEADPORT_REQUEST_ERROR if one is out of range, would have no effect, or does not go with
// another.
Request resolve(const headport_options& options, const Defaults& defaults, std::size_t prompts,
                std::int64_t vocab_size);

}  // namespace headport::internal
