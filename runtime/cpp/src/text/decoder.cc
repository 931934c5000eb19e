// What each decoder does is taken from the library `tokenizers`, release 0.23.
#include "text/decoder.h"

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>

#include "error.h"
#include "text/utf8.h"

namespace headport::internal {
namespace {

using nlohmann::json;
using Pieces = std::vector<std::string>;

[[noreturn]] void refuse(const std::string& what) {
  throw Error(HEADPORT_UNSUPPORTED,
              text("tokenizer.json: ", what, " was found, which this library cannot decode; work "
                   "with ids, or decode them with the Python runtime"));
}

// Visits the characters of valid UTF-8.
template <typename Visit>
void for_each_character(const std::string& piece, Visit visit) {
  std::size_t broken = 0;
  for (std::size_t place = 0; place < piece.size();) {
    const std::size_t size = std::max<std::size_t>(1, character_at(piece, place, broken));
    visit(std::string_view(piece).substr(place, size));
    place += size;
  }
}

// Byte-level vocabularies write each byte as a character: printable ones as themselves, the others
// from U+0100 on. Source: GPT-2's `bytes_to_unicode`.
std::array<int, 0x144> bytes_of_characters() {
  std::array<int, 0x144> found;
  found.fill(-1);
  std::size_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) ||
                           (byte >= 0xAE && byte <= 0xFF);
    found[printable ? static_cast<std::size_t>(byte) : next++] = byte;
  }
  return found;
}

void byte_level(Pieces& pieces) {
  std::string bytes;
  for (const std::string& piece : pieces) append_bytes(piece, bytes);
  pieces.assign(1, lossy(bytes));
}

// A run of bytes that is no UTF-8 becomes as many replacements as it has bytes.
void byte_fallback(Pieces& pieces) {
  Pieces found;
  std::string run;
  const auto close = [&] {
    if (is_utf8(run)) {
      if (!run.empty()) found.push_back(run);
    } else {
      found.insert(found.end(), run.size(), std::string(kReplacement));
    }
    run.clear();
  };
  for (std::string& piece : pieces) {
    const int byte = byte_of_piece(piece);
    if (byte >= 0) {
      run += static_cast<char>(byte);
      continue;
    }
    close();
    found.push_back(std::move(piece));
  }
  close();
  pieces = std::move(found);
}

void fuse(Pieces& pieces) {
  std::string all;
  for (const std::string& piece : pieces) all += piece;
  pieces.assign(1, std::move(all));
}

std::string replaced(const std::string& piece, const std::string& old, const std::string& now) {
  std::string found;
  std::size_t place = 0;
  for (std::size_t at = piece.find(old); at != std::string::npos; at = piece.find(old, place)) {
    found.append(piece, place, at - place).append(now);
    place = at + old.size();
  }
  return found.append(piece, place);
}

DecoderStep replace(const json& decoder) {
  const json& pattern = decoder.at("pattern");
  if (!pattern.is_object() || !pattern.contains("String")) refuse("a pattern of a Replace");
  const std::string old = pattern["String"], now = decoder.at("content");
  if (old.empty()) refuse("an empty Replace");
  return [old, now](Pieces& pieces) {
    for (std::string& piece : pieces) piece = replaced(piece, old, now);
  };
}

DecoderStep strip(const json& decoder) {
  const std::string content = decoder.at("content");
  const std::size_t most = decoder.at("start");
  if (decoder.at("stop") != 0 || content.empty()) refuse("a Strip at the end");
  return [content, most](Pieces& pieces) {
    for (std::string& piece : pieces) {
      std::size_t count = 0;
      while (count < most && piece.compare(count * content.size(), content.size(), content) == 0) {
        ++count;
      }
      piece.erase(0, count * content.size());
    }
  };
}

DecoderStep metaspace(const json& decoder) {
  const std::string mark = decoder.at("replacement");
  const bool prepended = decoder.value("prepend_scheme", "always") != "never";
  return [mark, prepended](Pieces& pieces) {
    for (std::size_t n = 0; n < pieces.size(); ++n) {
      pieces[n] = replaced(pieces[n], mark, n == 0 && prepended ? "" : " ");
    }
  };
}

using Maker = DecoderStep (*)(const json&);

const std::map<std::string, Maker> kSteps = {
    {"ByteFallback", [](const json&) { return DecoderStep(byte_fallback); }},
    {"ByteLevel", [](const json&) { return DecoderStep(byte_level); }},
    {"Fuse", [](const json&) { return DecoderStep(fuse); }},
    {"Metaspace", metaspace},
    {"Replace", replace},
    {"Strip", strip},
};

}  // namespace

void append_bytes(const std::string& piece, std::string& bytes) {
  static const auto kBytes = bytes_of_characters();
  const std::size_t before = bytes.size();
  bool plain = false;
  for_each_character(piece, [&](std::string_view character) {
    const char32_t point = point_of(character);
    const int byte = point < kBytes.size() ? kBytes[point] : -1;
    plain = plain || byte < 0;
    bytes += static_cast<char>(byte);
  });
  if (!plain) return;
  bytes.resize(before);  // no spelling of bytes, such as an added token: it stands for itself
  bytes += piece;
}

int byte_of_piece(const std::string& piece) {
  const auto digit = [](char each) {
    if (each >= '0' && each <= '9') return each - '0';
    if (each >= 'A' && each <= 'F') return each - 'A' + 10;
    if (each >= 'a' && each <= 'f') return each - 'a' + 10;
    return -1;
  };
  if (piece.size() != 6 || piece.compare(0, 3, "<0x") != 0 || piece[5] != '>') return -1;
  const int high = digit(piece[3]), low = digit(piece[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

Decoder::Decoder(const json& decoder) {
  if (decoder.is_null()) {  // pieces with spaces between them
    streamable_ = false;
    return;
  }
  add(decoder);
}

void Decoder::add(const json& decoder) {
  const std::string type = decoder.at("type");
  if (type == "Sequence") {
    for (const json& each : decoder.at("decoders")) add(each);
    return;
  }
  const auto found = kSteps.find(type);
  if (found == kSteps.end()) refuse(text("the decoder ", type));
  has_byte_pieces_ = has_byte_pieces_ || type == "ByteFallback";
  steps_.push_back(found->second(decoder));
}

std::string Decoder::decode(std::vector<std::string>& pieces) const {
  for (const DecoderStep& step : steps_) step(pieces);
  std::string found;
  for (std::size_t n = 0; n < pieces.size(); ++n) {
    if (!streamable_ && n > 0) found += ' ';
    found += pieces[n];
  }
  return found;
}

}  // namespace headport::internal
