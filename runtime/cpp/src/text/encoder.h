// Text → token ids, by the shared library of ONNX Runtime GenAI, which holds the tokenizers of ONNX
// Runtime Extensions. It is loaded when a text is first encoded, and only then.
//
// That library covers more tokenizers than it covers exactly, so those are refused whose ids were
// found to differ from those of the library `tokenizers`, or were not compared.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ort/library.h"

namespace headport::internal {

class Encoder {
 public:
  // `source` is a `tokenizer.json`, `library` a path, or empty: $HEADPORT_TOKENIZER.
  // Errors: HEADPORT_UNSUPPORTED, naming what about the tokenizer was not compared;
  // HEADPORT_LIBRARY_ERROR if the library is missing, lacks functions, or fails.
  Encoder(const std::string& source, const std::string& where, const std::string& library,
          const Library& onnxruntime);
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;
  ~Encoder();

  struct Found {
    std::vector<std::int64_t> ids;
    std::size_t first = 0, last = 0;  // which of them are the text's own
  };
  // One call at a time. The text is UTF-8 without null characters.
  Found encode(const std::string& text) const;

 private:
  struct Api;
  void check(void* result, const char* what) const;

  std::vector<std::int64_t> before_;  // special tokens that the tokenizer puts around a text
  std::vector<std::int64_t> after_;
  std::unique_ptr<Api> api_;
  void* tokenizer_ = nullptr;
};

}  // namespace headport::internal
