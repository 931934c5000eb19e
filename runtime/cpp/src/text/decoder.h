// Pieces of a vocabulary → text: the decoders of `tokenizer.json` that a text can grow under.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace headport::internal {

// Changes the pieces of a reply in place; some make one piece of all.
using DecoderStep = std::function<void(std::vector<std::string>& pieces)>;

class Decoder {
 public:
  // `decoder` is that of a `tokenizer.json`, null where it has none.
  // Errors: HEADPORT_UNSUPPORTED naming a decoder that this library lacks.
  explicit Decoder(const nlohmann::json& decoder);

  // The text of some pieces, which are used up.
  std::string decode(std::vector<std::string>& pieces) const;
  // Whether earlier text never changes when pieces are added, once broken characters and bytes at
  // the end are held back.
  bool streamable() const { return streamable_; }
  // Whether pieces like <0x0A> stand for bytes.
  bool has_byte_pieces() const { return has_byte_pieces_; }

 private:
  void add(const nlohmann::json& decoder);

  std::vector<DecoderStep> steps_;
  bool streamable_ = true;
  bool has_byte_pieces_ = false;
};

// The bytes that a piece of a byte-level vocabulary spells; of one that spells none its own.
void append_bytes(const std::string& piece, std::string& bytes);
// The byte of a piece like <0x0A>, or -1.
int byte_of_piece(const std::string& piece);

}  // namespace headport::internal
