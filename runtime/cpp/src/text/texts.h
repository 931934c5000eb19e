// Text ↔ token ids with a bundle's `tokenizer.json`. Mirrors runtime/text.py.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "bundle/bundle.h"
#include "ort/library.h"
#include "span.h"
#include "text/decoder.h"
#include "text/encoder.h"

namespace headport::internal {

class Texts {
 public:
  // `source` is a `tokenizer.json`; `where` names it in messages.
  // Errors: HEADPORT_BUNDLE_ERROR if it is none; HEADPORT_UNSUPPORTED if its decoder is not known.
  Texts(const std::string& source, const std::string& where);

  // Text of token ids, special tokens left out.
  std::string decode(IdSpan ids) const;
  bool streamable() const { return decoder_.streamable(); }
  // Whether a token stands for a byte, of which several may make a character.
  bool is_byte(std::int64_t id) const { return byte_ids_.count(id) > 0; }

  // Token ids of a text, with the special tokens that the tokenizer itself adds. `library` is a
  // path, or empty: $HEADPORT_TOKENIZER.
  // Errors: HEADPORT_PROMPT_ERROR if it is no UTF-8; HEADPORT_UNSUPPORTED if this tokenizer is not
  // one whose ids are known to be right; HEADPORT_LIBRARY_ERROR.
  std::vector<std::int64_t> encode(const std::string& text, const std::string& library,
                                   const Library& onnxruntime) const;

 private:
  Texts(const std::string& source, const std::string& where, const nlohmann::json& value);

  std::string source_;
  std::string where_;
  Decoder decoder_;
  std::unordered_map<std::int64_t, std::string> pieces_;
  std::unordered_set<std::int64_t> special_;
  std::unordered_set<std::int64_t> byte_ids_;
  mutable std::mutex mutex_;  // of the encoder, which is made when first needed
  mutable std::unique_ptr<Encoder> encoder_;
};

// A bundle's texts, read when first needed: a program that works with ids needs no tokenizer.
class BundleTexts {
 public:
  // `onnxruntime` may be null: then texts are decoded only.
  BundleTexts(const Bundle& bundle, std::string library, std::shared_ptr<Library> onnxruntime);

  // Errors: as `Texts`; HEADPORT_BUNDLE_ERROR if the bundle has no tokenizer.
  const Texts& get();
  std::vector<std::int64_t> encode(const std::string& text);

 private:
  std::string path_;  // of `tokenizer.json`; empty where the bundle has none
  std::string where_;
  std::string library_;
  std::shared_ptr<Library> onnxruntime_;
  std::once_flag once_;
  std::unique_ptr<Texts> texts_;
};

}  // namespace headport::internal
