// Source: the Unicode Standard, table 3-7 "Well-Formed UTF-8 Byte Sequences", and chapter 3.9 on
// replacing the longest beginning of a sequence.
#include "text/utf8.h"

namespace headport::internal {
namespace {

unsigned byte_at(std::string_view bytes, std::size_t place) {
  return place < bytes.size() ? static_cast<unsigned char>(bytes[place]) : 0u;
}

}  // namespace

std::size_t character_at(std::string_view bytes, std::size_t place, std::size_t& broken) {
  const unsigned first = byte_at(bytes, place);
  broken = 1;
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  const std::size_t size = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  // What may follow at once: neither overlong forms nor surrogates nor what is above U+10FFFF.
  unsigned low = 0x80, high = 0xBF;
  if (first == 0xE0) low = 0xA0;
  if (first == 0xED) high = 0x9F;
  if (first == 0xF0) low = 0x90;
  if (first == 0xF4) high = 0x8F;
  for (std::size_t n = 1; n < size; ++n) {
    const unsigned next = byte_at(bytes, place + n);
    if (next < low || next > high) return 0;
    broken = n + 1;
    low = 0x80;
    high = 0xBF;
  }
  return size;
}

bool is_utf8(std::string_view bytes) {
  std::size_t broken = 0;
  for (std::size_t place = 0; place < bytes.size();) {
    const std::size_t size = character_at(bytes, place, broken);
    if (size == 0) return false;
    place += size;
  }
  return true;
}

std::string lossy(std::string_view bytes) {
  std::string found;
  found.reserve(bytes.size());
  std::size_t broken = 0;
  for (std::size_t place = 0; place < bytes.size();) {
    const std::size_t size = character_at(bytes, place, broken);
    found += size > 0 ? bytes.substr(place, size) : kReplacement;
    place += size > 0 ? size : broken;
  }
  return found;
}

std::string utf8(char32_t point) {
  const auto tail = [&](unsigned shift) {
    return static_cast<char>(0x80 | ((point >> shift) & 0x3F));
  };
  if (point < 0x80) return {static_cast<char>(point)};
  if (point < 0x800) return {static_cast<char>(0xC0 | (point >> 6)), tail(0)};
  if (point < 0x10000) return {static_cast<char>(0xE0 | (point >> 12)), tail(6), tail(0)};
  return {static_cast<char>(0xF0 | (point >> 18)), tail(12), tail(6), tail(0)};
}

char32_t point_of(std::string_view character) {
  const std::size_t size = character.size();
  char32_t found = byte_at(character, 0);
  if (size > 1) found &= 0xFFu >> (size + 1);
  for (std::size_t n = 1; n < size; ++n) found = found << 6 | (byte_at(character, n) & 0x3F);
  return found;
}

}  // namespace headport::internal
