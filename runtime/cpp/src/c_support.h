// What the functions of the C ABI have in common: statuses and messages, and structs that callers know
// in different sizes.
#pragma once

#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "error.h"
#include "headport/headport.h"

namespace headport::internal {

// Of the last call that failed in this thread.
inline std::string& last_error() {
  thread_local std::string message;
  return message;
}

inline headport_status failed(headport_status status, const char* message) noexcept {
  try {
    last_error() = message;
  } catch (...) {
    last_error().clear();
  }
  return status;
}

// Runs some work and turns what it throws into a status and a message.
template <typename Work>
headport_status guarded(Work work) noexcept {
  try {
    work();
    return HEADPORT_OK;
  } catch (const Error& error) {
    return failed(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return failed(HEADPORT_OUT_OF_MEMORY, "memory ran out; lower max_rows, max_context or the "
                                          "number of prompts");
  } catch (const std::exception& error) {
    return failed(HEADPORT_INTERNAL_ERROR, error.what());
  } catch (...) {
    return failed(HEADPORT_INTERNAL_ERROR, "an exception of an unknown type");
  }
}

inline void require(const void* pointer, const char* name) {
  if (pointer == nullptr) {
    throw Error(HEADPORT_USAGE_ERROR, text(name, ": a null pointer was given"));
  }
}

// The first `size` bytes of a struct: as many as the caller's header knows.
template <typename Struct>
void hand_out(Struct found, Struct* target, std::size_t size, const char* name) {
  require(target, name);
  if (size < sizeof found.struct_size || size > sizeof found) {
    throw Error(HEADPORT_USAGE_ERROR,
                    text(name, ": a struct of up to ", sizeof found, " bytes was expected, ",
                             size, " were given; the header is newer than the library"));
  }
  found.struct_size = size;
  std::memcpy(target, &found, size);
}

// What a caller filled; what its header does not know has its default.
template <typename Struct>
Struct taken(const Struct* given, Struct defaults, const char* name) {
  if (given == nullptr) return defaults;
  const std::size_t size = given->struct_size;
  if (size < sizeof size || size > sizeof defaults) {
    throw Error(HEADPORT_USAGE_ERROR,
                    text(name, ": struct_size from ", sizeof size, " to ", sizeof defaults,
                             " was expected, ", size, " was found; fill it with its init function "
                             "first"));
  }
  std::memcpy(&defaults, given, size);
  return defaults;
}

}  // namespace headport::internal
