// Checks of tests: what fails is printed with its place, and the program's exit status is 1.
#pragma once

#include <cstdio>
#include <string>

namespace headport::test {

inline int failures = 0;
inline int checks = 0;

inline void check(bool holds, const std::string& what, const char* file, int line) {
  ++checks;
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

inline int result() {
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 && checks > 0 ? 0 : 1;
}

}  // namespace headport::test

#define CHECK(condition) ::headport::test::check((condition), #condition, __FILE__, __LINE__)
#define CHECK_NAMED(condition, name) \
  ::headport::test::check((condition), std::string(#condition " in ") + (name), __FILE__, __LINE__)
