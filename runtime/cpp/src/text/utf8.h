// UTF-8: what is valid, and what becomes of what is not.
#pragma once

#include <string>
#include <string_view>

namespace headport::internal {

inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Bytes of the character that begins here; 0 where none does, and then `broken` is how many bytes
// one replacement stands for: the longest beginning of a character, or one byte.
std::size_t character_at(std::string_view bytes, std::size_t place, std::size_t& broken);

bool is_utf8(std::string_view bytes);
// With a replacement for each broken part, as Rust's `String::from_utf8_lossy` has it.
std::string lossy(std::string_view bytes);
// A code point as UTF-8.
std::string utf8(char32_t point);
// The code point of a character of valid UTF-8.
char32_t point_of(std::string_view character);

}  // namespace headport::internal
