// Compared were byte-level BPE tokenizers as GPT-2 and SmolLM2 have them, with texts of many scripts
// and random Unicode: tests/cpp/test_texts.py. Found to differ with release 0.18 of the library:
// a Split as Llama 3 and Qwen 2 have it (around line breaks between spaces), Digits and
// add_prefix_space (left out), normalizers (left out), byte pieces as Llama 2 has them.
#include "text/encodable.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "bundle/json.h"
#include "error.h"

namespace headport::internal {
namespace {

using nlohmann::json;

[[noreturn]] void refuse(const std::string& where, const std::string& expected,
                         const std::string& found) {
  throw Error(HEADPORT_UNSUPPORTED,
              text(where, ": texts are encoded with tokenizers that have ", expected, "; ", found,
                   " was found, for which the tokenizer library's ids were not found to be "
                   "Python's; give ids"));
}

// What a field holds, or null.
const json& field(const json& value, const char* name) {
  static const json kNull;
  const auto found = value.find(name);
  return found == value.end() ? kNull : *found;
}

bool is_blank(const json& value) {
  return value.is_null() || value == false || value == "" || value == 0.0;
}

void check_model(const json& model, const std::string& where) {
  if (field(model, "type") != "BPE") {
    refuse(where, "a model of type BPE", field(model, "type").dump());
  }
  for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix",
                           "byte_fallback", "ignore_merges"}) {
    if (!is_blank(field(model, name))) {
      refuse(where, text("no ", name), text(name, "=", field(model, name).dump()));
    }
  }
}

void check_pre_tokenizer(const json& value, const std::string& where) {
  const char* wanted = "the pre-tokenizer ByteLevel without add_prefix_space, with use_regex";
  const bool fits = value.is_object() && field(value, "type") == "ByteLevel" &&
                    is_blank(field(value, "add_prefix_space")) && field(value, "use_regex") != false;
  if (!fits) refuse(where, wanted, value.dump().substr(0, 200));
}

// Whether a text could be cut at either of two added tokens.
bool overlap(const std::string& one, const std::string& other) {
  if (one.find(other) != std::string::npos) return true;
  for (std::size_t size = 1; size < std::min(one.size(), other.size()); ++size) {
    if (one.compare(one.size() - size, size, other, 0, size) == 0) return true;
  }
  return false;
}

void check_added_tokens(const json& tokens, const std::string& where) {
  std::vector<std::string> contents;
  for (const json& token : tokens) {
    for (const char* name : {"lstrip", "rstrip", "single_word"}) {
      if (!is_blank(field(token, name))) {
        refuse(where, text("added tokens without ", name), token.dump());
      }
    }
    contents.push_back(token.at("content"));
  }
  for (std::size_t a = 0; a < contents.size(); ++a) {
    for (std::size_t b = 0; b < contents.size(); ++b) {
      if (a != b && overlap(contents[a], contents[b])) {
        refuse(where, "added tokens of which none overlaps another",
               json({contents[a], contents[b]}).dump());
      }
    }
  }
}

// A template: special tokens, the text once, special tokens.
void read_template(const json& value, const std::string& where, Surroundings& found) {
  bool behind = false;
  for (const json& part : value.at("single")) {
    if (part.contains("Sequence")) {
      if (behind) refuse(where, "a template with one text", value["single"].dump());
      behind = true;
      continue;
    }
    const std::string name = part.at("SpecialToken").at("id");
    for (const json& id : value.at("special_tokens").at(name).at("ids")) {
      (behind ? found.after : found.before).push_back(id);
    }
  }
}

void read_post_processor(const json& value, const std::string& where, Surroundings& found) {
  if (value.is_null()) return;
  const std::string type = value.at("type");
  if (type == "ByteLevel") return;  // changes offsets alone
  if (type == "TemplateProcessing") {
    read_template(value, where, found);
  } else if (type == "Sequence") {
    for (const json& each : value.at("processors")) read_post_processor(each, where, found);
  } else {
    refuse(where, "the post-processors TemplateProcessing and ByteLevel", type);
  }
}

}  // namespace

Surroundings check_encodable(const std::string& source, const std::string& where) {
  const json value = parse_json(source, where, "a tokenizer");
  try {
    if (!field(value, "normalizer").is_null()) {
      refuse(where, "no normalizer", value["normalizer"].dump().substr(0, 200));
    }
    check_model(value.at("model"), where);
    check_pre_tokenizer(field(value, "pre_tokenizer"), where);
    check_added_tokens(field(value, "added_tokens"), where);
    Surroundings found;
    read_post_processor(field(value, "post_processor"), where, found);
    return found;
  } catch (const json::exception& error) {
    throw Error(HEADPORT_BUNDLE_ERROR, text(where, ": not a tokenizer (", error.what(), ")"));
  }
}

}  // namespace headport::internal
