#include "connection.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstdlib>
#include <filesystem>

namespace service {
namespace {

bool is_peer(int socket, const std::string& address, int port) {
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  auto* generic = reinterpret_cast<sockaddr*>(&peer);
  if (getpeername(socket, generic, &size) != 0) return false;
  char host[NI_MAXHOST], service[NI_MAXSERV];
  constexpr int kNumbers = NI_NUMERICHOST | NI_NUMERICSERV;
  if (getnameinfo(generic, size, host, sizeof host, service, sizeof service, kNumbers) != 0) {
    return false;
  }
  return address == host && std::to_string(port) == service;
}

// The library tells the client's address and port, which belong to one open socket only.
int socket_of(const httplib::Request& request) {
  std::error_code error;
  std::filesystem::directory_iterator entry("/proc/self/fd", error), end;
  for (; !error && entry != end; entry.increment(error)) {
    const int socket = std::atoi(entry->path().filename().c_str());
    if (is_peer(socket, request.remote_addr, request.remote_port)) return socket;
  }
  return -1;
}

}  // namespace

Connection::Connection(const httplib::Request& request) : socket_(socket_of(request)) {}

bool Connection::has_gone() const {
  pollfd wanted{socket_, POLLRDHUP, 0};
  return socket_ >= 0 && poll(&wanted, 1, 0) > 0;
}

}  // namespace service
