// A request's body → what to generate. A field that is in no table is refused by its name.
#pragma once

#include <headport/headport.hpp>
#include <string>
#include <vector>

#include "command_line.h"
#include "texts.h"

namespace service {

struct Asked {
  std::string model;  // empty: the request names none
  std::vector<headport::TokenIds> prompts;
  headport::Options options;
  bool stream = false;
  bool usage_part = false;  // a stream ends with the counts of tokens
  bool token_ids = false;   // the answer holds them
};

// `options`: the bundle's own. Errors: Fault 400, if the body is no JSON object, a field is not
// supported or has a value of another type, or a limit is exceeded. Ranges are the generator's.
Asked read_completion(const std::string& body, headport::Options options, const Texts& texts,
                      const Limits& limits);

}  // namespace service
