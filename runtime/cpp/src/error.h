// The one kind of exception inside the library. The C ABI turns it into a status and a message.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "headport/headport.h"

namespace headport::internal {

// What was expected, what was found, what to do.
class Error : public std::runtime_error {
 public:
  Error(headport_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}

  headport_status status() const { return status_; }

 private:
  headport_status status_;
};

// Words and numbers → one text.
template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace headport::internal
