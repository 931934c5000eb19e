// UTF-8, and texts that grow: the edges that comparisons with Python might miss.
#include <string>

#include "check.h"
#include "error.h"
#include "text/encodable.h"
#include "text/text_stream.h"
#include "text/texts.h"
#include "text/utf8.h"

namespace headport::internal {
namespace {

void check_utf8() {
  CHECK(lossy("a\xC3\xA9") == "a\xC3\xA9");
  CHECK(lossy("\xE2\x82") == kReplacement);               // one beginning, one replacement
  CHECK(lossy("\xE2(") == std::string(kReplacement) + "(");
  CHECK(lossy("\xC0\xAF") == std::string(kReplacement) + std::string(kReplacement));  // overlong
  CHECK(lossy("\xED\xA0\x80").size() == 9);               // a surrogate: three bytes, none fits
  CHECK(!is_utf8("\xF4\x90\x80\x80") && is_utf8("\xF4\x8F\xBF\xBF") && is_utf8(""));
  CHECK(utf8(0x1F642) == "\xF0\x9F\x99\x82" && point_of("\xF0\x9F\x99\x82") == 0x1F642);
}

constexpr const char* kTokenizer = R"({
  "added_tokens": [{"id": 9, "content": "<|e|>", "special": true}],
  "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
  "post_processor": {"type": "Sequence", "processors": [
    {"type": "ByteLevel"},
    {"type": "TemplateProcessing",
     "single": [{"SpecialToken": {"id": "<|e|>"}}, {"Sequence": {"id": "A"}},
                {"SpecialToken": {"id": "<|e|>"}}],
     "special_tokens": {"<|e|>": {"id": "<|e|>", "ids": [9]}}}]},
  "decoder": {"type": "ByteLevel"},
  "model": {"type": "BPE", "vocab": {"a": 0, "\u0120b": 1, "\u00e2\u0124": 2, "\u00ac": 3, "c": 4}}
})";

void check_stream() {
  const Texts texts(kTokenizer, "tokenizer.json");
  CHECK(texts.decode(std::vector<std::int64_t>{0, 1, 9, 2, 3, 77}) == "a b\xE2\x82\xAC");
  const std::vector<std::string> stop = {"bc", "\xE2\x82\xAC"};
  const std::vector<std::int64_t> ids = {0, 1, 0, 2, 3};
  TextStream stream(texts, stop);
  const auto part = [&](std::size_t count) {
    return std::string(stream.push({ids.data(), count}));
  };
  CHECK(part(1) == "a");
  CHECK(part(2) == " ");  // b may begin a stop text
  CHECK(part(3) == "ba");
  CHECK(part(4).empty());  // two bytes of three
  CHECK(part(5).empty() && stream.stopped() && stream.text() == "a ba");
}

void check_refused(const std::string& source, headport_status status, const char* words) {
  try {
    check_encodable(source, "tokenizer.json");
    CHECK_NAMED(false, words);
  } catch (const Error& error) {
    CHECK_NAMED(error.status() == status, error.what());
    CHECK_NAMED(std::string(error.what()).find(words) != std::string::npos, error.what());
  }
}

void check_encodables() {
  const std::string source = kTokenizer;
  const Surroundings found = check_encodable(source, "tokenizer.json");
  CHECK(found.before == std::vector<std::int64_t>{9} && found.after == found.before);
  const auto with = [&](const std::string& old, const std::string& now) {
    std::string changed = source;
    changed.replace(changed.find(old), old.size(), now);
    return changed;
  };
  check_refused("{", HEADPORT_BUNDLE_ERROR, "not a tokenizer");
  check_refused(with(R"("type": "BPE", )", R"("type": "BPE", "ignore_merges": true, )"),
                HEADPORT_UNSUPPORTED, "no ignore_merges");
  check_refused(with(R"("special": true)", R"("special": true, "lstrip": true)"),
                HEADPORT_UNSUPPORTED, "added tokens without lstrip");
  check_refused(with(R"("add_prefix_space": false)", R"("use_regex": false)"),
                HEADPORT_UNSUPPORTED, "with use_regex");
  check_refused(with(R"({"type": "ByteLevel"},)", R"({"type": "BertProcessing"},)"),
                HEADPORT_UNSUPPORTED, "BertProcessing");
}

}  // namespace
}  // namespace headport::internal

int main() {
  using namespace headport::internal;
  check_utf8();
  check_stream();
  check_encodables();
  return headport::test::result();
}
