// The client behind a request, while nothing is sent to it.
#pragma once

#include <httplib.h>

namespace service {

// Notices that a client has hung up. The HTTP library notices when it writes, and a whole answer is
// written only when it is there.
class Connection {
 public:
  // Of the request that the calling thread is answering.
  explicit Connection(const httplib::Request& request);

  bool has_gone() const;

 private:
  int socket_;  // owned by the HTTP library, open until the request is answered; -1: not found
};

}  // namespace service
