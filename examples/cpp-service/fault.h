// What a client is told when its request fails.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

namespace service {

class Fault : public std::runtime_error {
 public:
  // `status` of HTTP, `kind` as the OpenAI API words it.
  Fault(int status, const char* kind, const std::string& message)
      : std::runtime_error(message), status_(status), kind_(kind) {}

  int status() const noexcept { return status_; }
  const char* kind() const noexcept { return kind_; }

 private:
  int status_;
  const char* kind_;  // a literal
};

// What a client is told of an error; nothing of one that nobody expected.
Fault fault_of(const std::exception_ptr& error);

inline Fault wrong_request(const std::string& message) {
  return Fault(400, "invalid_request_error", message);
}

}  // namespace service
