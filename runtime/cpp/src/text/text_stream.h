// Text of a growing list of token ids; the parts joined equal the decoded whole. Mirrors
// `TextStream` of runtime/text.py.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/texts.h"

namespace headport::internal {

// A part never ends inside a character, nor inside what may become a stop text. With a stop text in
// it, the text ends before that.
class TextStream {
 public:
  // `stop` must stay; none of it is empty.
  TextStream(const Texts& texts, const std::vector<std::string>& stop)
      : texts_(&texts), stop_(&stop) {}

  // What became definite with the last of these ids.
  std::string_view push(IdSpan ids);
  // What is left: no id follows.
  std::string_view finish(IdSpan ids);

  const std::string& text() const { return text_; }
  bool stopped() const { return stopped_; }

 private:
  std::string_view give(std::string text, bool final);

  const Texts* texts_;
  const std::vector<std::string>* stop_;
  std::string text_;  // given out so far
  bool stopped_ = false;
};

}  // namespace headport::internal
