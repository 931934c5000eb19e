#include "text/text_stream.h"

#include <algorithm>

#include "text/utf8.h"

namespace headport::internal {
namespace {

// Length of the longest end of `text` that begins a stop text.
std::size_t pending(const std::string& text, const std::vector<std::string>& stop) {
  std::size_t longest = 0;
  for (const std::string& each : stop) {
    for (std::size_t size = std::min(each.size() - 1, text.size()); size > longest; --size) {
      if (text.compare(text.size() - size, size, each, 0, size) == 0) longest = size;
    }
  }
  return longest;
}

}  // namespace

std::string_view TextStream::push(IdSpan ids) {
  if (!texts_->streamable()) return give({}, false);
  // A run of byte tokens is decoded as a whole: one bad byte changes all of it.
  while (ids.size > 0 && texts_->is_byte(ids[ids.size - 1])) --ids.size;
  std::string definite = texts_->decode(ids);
  const std::size_t tail = kReplacement.size();
  if (definite.size() >= tail && definite.compare(definite.size() - tail, tail, kReplacement) == 0) {
    definite.resize(definite.size() - tail);
  }
  return give(std::move(definite), false);
}

std::string_view TextStream::finish(IdSpan ids) { return give(texts_->decode(ids), true); }

std::string_view TextStream::give(std::string text, bool final) {
  if (stopped_) return {};
  std::size_t end = std::string::npos;
  for (const std::string& each : *stop_) end = std::min(end, text.find(each));
  if (end != std::string::npos) {
    stopped_ = true;
    text.resize(end);
  } else if (!final) {
    text.resize(text.size() - pending(text, *stop_));
  }
  if (text.size() <= text_.size()) return {};
  const std::size_t before = text_.size();
  text_ = std::move(text);
  return std::string_view(text_).substr(before);
}

}  // namespace headport::internal
