// `headport-service BUNDLE`: a bundle over HTTP until the process is told to stop.
#include <httplib.h>

#include <csignal>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "command_line.h"
#include "job.h"
#include "service.h"

namespace {

constexpr timespec kGlance{0, 50'000'000};  // 50 ms
constexpr double kLastWords = 5.0;          // seconds for answers that tell of the end

sigset_t stop_signals() {
  sigset_t found;
  sigemptyset(&found);
  sigaddset(&found, SIGINT);
  sigaddset(&found, SIGTERM);
  return found;
}

// Until nothing is open, the time is over, or the process is told to stop once more.
void wait_until_answered(const service::Service& answers, double seconds) {
  const sigset_t signals = stop_signals();
  const auto end = service::Clock::now() + std::chrono::duration<double>(seconds);
  while (answers.open() > 0 && service::Clock::now() < end) {
    if (sigtimedwait(&signals, nullptr, &kGlance) > 0) return;
  }
}

// The server must run until all is answered: it breaks off streams as it stops.
void stop_when_told(service::Pool& pool, const service::Service& answers,
                    httplib::Server& server, double grace) {
  const sigset_t signals = stop_signals();
  int signal = 0;
  sigwait(&signals, &signal);
  pool.refuse_more();
  wait_until_answered(answers, grace);
  pool.end_all();
  wait_until_answered(answers, kLastWords);
  server.stop();
}

int listen(httplib::Server& server, const service::CommandLine& line) {
  // The library's own choice lets two processes listen on one port.
  server.set_socket_options([](socket_t socket) {
    const int yes = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  });
  if (line.port == 0) return server.bind_to_any_port(line.host);
  const int port = static_cast<int>(line.port);
  return server.bind_to_port(line.host, port) ? port : -1;
}

int serve(const service::CommandLine& line) {
  // Before the bundle is loaded, which takes longer than to find the port taken.
  httplib::Server server;
  const int port = listen(server, line);
  if (port < 0) {
    std::fprintf(stderr, "%s:%lld cannot be listened on; choose another --host or --port\n",
                 line.host.c_str(), static_cast<long long>(line.port));
    return 2;
  }
  // For all threads that are started from here on; one of them waits for the signals.
  const sigset_t signals = stop_signals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  service::Pool pool(line);
  service::Service answers(pool, line);
  answers.attach(server);
  std::thread stopper([&] { stop_when_told(pool, answers, server, line.limits.grace); });
  const std::string host = line.host.find(':') == std::string::npos ? line.host
                                                                    : "[" + line.host + "]";
  std::fprintf(stderr,
               "%s at http://%s:%d/v1, %lld workers, contexts of %lld tokens; end it with Ctrl-C\n",
               line.name.c_str(), host.c_str(), port, static_cast<long long>(line.workers),
               static_cast<long long>(pool.info().max_context));
  if (!answers.texts().known()) {
    std::fprintf(stderr, "no texts, ids only: %s\n", answers.texts().reason().c_str());
  }
  const bool served = server.listen_after_bind();
  if (!served && !pool.closing()) kill(getpid(), SIGTERM);  // the server failed; nobody else tells
  stopper.join();
  const service::Counts counts = pool.counts();
  std::fprintf(stderr, "[%zu requests, %zu tokens]\n", counts.requests, counts.new_tokens);
  return served ? 0 : 1;
}

}  // namespace

int main(int count, char** words) {
  const std::vector<std::string> given(words + 1, words + count);
  for (const std::string& word : given) {
    if (word == "--help") {
      std::printf("%s", service::usage().c_str());
      return 0;
    }
  }
  try {
    return serve(service::read_command_line(given));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "headport-service: %s\n", error.what());
    return 2;
  }
}
