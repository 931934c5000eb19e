#include "text/texts.h"

#include <nlohmann/json.hpp>

#include "bundle/json.h"
#include "error.h"
#include "text/utf8.h"

namespace headport::internal {
namespace {

using nlohmann::json;

constexpr const char* kFile = "tokenizer.json";
constexpr std::uintmax_t kFileBytes = std::uintmax_t{256} << 20;

// Reading throws what the JSON library throws where a field is missing or of another type.
template <typename Read>
auto reading(const std::string& where, Read read) {
  try {
    return read();
  } catch (const json::exception& error) {
    throw Error(HEADPORT_BUNDLE_ERROR, text(where, ": not a tokenizer (", error.what(), ")"));
  }
}

// A number that says where each piece stands, or the place itself.
void read_vocabulary(const json& model, std::unordered_map<std::int64_t, std::string>& pieces) {
  const json& vocabulary = model.at("vocab");
  if (vocabulary.is_object()) {
    for (const auto& [piece, id] : vocabulary.items()) pieces[id.get<std::int64_t>()] = piece;
    return;
  }
  for (std::size_t id = 0; id < vocabulary.size(); ++id) {
    pieces[static_cast<std::int64_t>(id)] = vocabulary[id].at(0).get<std::string>();
  }
}

std::size_t first_difference(const std::string& one, const std::string& other) {
  std::size_t n = 0;
  while (n < one.size() && n < other.size() && one[n] == other[n]) ++n;
  return n;
}

}  // namespace

Texts::Texts(const std::string& source, const std::string& where)
    : Texts(source, where, parse_json(source, where, "a tokenizer")) {}

Texts::Texts(const std::string& source, const std::string& where, const json& value)
    : source_(source),
      where_(where),
      decoder_(reading(where, [&] {
        const auto found = value.find("decoder");
        return Decoder(found == value.end() ? json() : *found);
      })) {
  reading(where, [&] {
    read_vocabulary(value.at("model"), pieces_);
    std::unordered_set<std::string> special;
    if (value.contains("added_tokens")) {
      for (const json& token : value["added_tokens"]) {
        pieces_[token.at("id").get<std::int64_t>()] = token.at("content").get<std::string>();
        if (token.at("special")) special.insert(token["content"].get<std::string>());
      }
    }
    for (const auto& [id, piece] : pieces_) {
      if (special.count(piece) > 0) special_.insert(id);
      if (decoder_.has_byte_pieces() && byte_of_piece(piece) >= 0) byte_ids_.insert(id);
    }
    return 0;
  });
}

std::string Texts::decode(IdSpan ids) const {
  std::vector<std::string> found;
  found.reserve(ids.size);
  for (const std::int64_t id : ids) {
    const auto piece = pieces_.find(id);
    if (piece != pieces_.end() && special_.count(id) == 0) found.push_back(piece->second);
  }
  return decoder_.decode(found);
}

std::vector<std::int64_t> Texts::encode(const std::string& source, const std::string& library,
                                        const Library& onnxruntime) const {
  if (!is_utf8(source) || source.find('\0') != std::string::npos) {
    throw Error(HEADPORT_PROMPT_ERROR,
                "a text of whole Unicode characters without U+0000 was expected, other bytes were "
                "found; give it as UTF-8, or give ids");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (encoder_ == nullptr) {
    encoder_ = std::make_unique<Encoder>(source_, where_, library, onnxruntime);
  }
  const Encoder::Found found = encoder_->encode(source);
  // Byte-level pieces spell exactly the text that they were cut from.
  std::string spelled;
  for (std::size_t n = found.first; n < found.last; ++n) {
    const auto piece = pieces_.find(found.ids[n]);
    if (piece != pieces_.end()) append_bytes(piece->second, spelled);
  }
  if (spelled != source) {
    throw Error(HEADPORT_LIBRARY_ERROR,
                text("the tokenizer library gave ids that do not spell the text they are of, at byte ",
                     first_difference(spelled, source), "; encode this text with Python, and say so "
                     "to its makers"));
  }
  return found.ids;
}

BundleTexts::BundleTexts(const Bundle& bundle, std::string library,
                         std::shared_ptr<Library> onnxruntime)
    : library_(std::move(library)), onnxruntime_(std::move(onnxruntime)) {
  where_ = (bundle.path() / kFile).string();
  if (bundle.manifest().files.count(kFile) > 0) path_ = bundle.file(kFile).string();
}

const Texts& BundleTexts::get() {
  std::call_once(once_, [&] {
    if (path_.empty()) {
      throw Error(HEADPORT_BUNDLE_ERROR,
                  text(where_, ": texts need a tokenizer, this bundle has none; work with ids"));
    }
    texts_ = std::make_unique<Texts>(read_file(path_, kFileBytes), where_);
  });
  return *texts_;
}

std::vector<std::int64_t> BundleTexts::encode(const std::string& source) {
  if (onnxruntime_ == nullptr) {
    throw Error(HEADPORT_LIBRARY_ERROR,
                text(where_, ": the library that encodes texts needs ONNX Runtime, which plans load "
                     "only where it is named; give its path as settings.onnxruntime, or set "
                     "HEADPORT_ORT"));
  }
  return get().encode(source, library_, *onnxruntime_);
}

}  // namespace headport::internal
