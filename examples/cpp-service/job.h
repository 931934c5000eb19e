// Requests on their way through generators: a line of jobs, and one thread for each generator.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <headport/headport.hpp>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "command_line.h"
#include "fault.h"

namespace service {

using Clock = std::chrono::steady_clock;

// One new token, as a stream tells it.
struct Piece {
  std::size_t index;  // of the reply: prompt · n + sample
  std::int64_t token_id;
  headport_finish finish;
  std::string text;  // what became definite with it
  std::vector<headport::Likelihood> likelihoods;  // of it alone, where they were asked for
};

// A fault as threads hand it on: what exceptions share is counted where no sanitizer sees it.
struct Failure {
  explicit Failure(const Fault& fault)
      : status(fault.status()), kind(fault.kind()), message(fault.what()) {}
  [[noreturn]] void raise() const { throw Fault(status, kind, message); }

  int status;
  const char* kind;  // a literal
  std::string message;
};

// What one request asks of a generator, and what has come of it.
class Job {
 public:
  // `streamed`: tokens are told as they come, else at the end.
  Job(std::vector<headport::TokenIds> given, headport::Options wanted, bool streamed)
      : prompts(std::move(given)), options_(std::move(wanted)), streamed_(streamed) {}

  const std::vector<headport::TokenIds> prompts;

  // Waits a while for more; whether there is anything new to look at.
  bool wait(std::chrono::milliseconds time);
  // Something has come of it: a token, or its end.
  bool begun() const;
  bool done() const;
  // The oldest token that was not taken yet.
  std::optional<Piece> take();
  // Once it is done. Errors: Fault.
  const std::vector<headport::Reply>& replies() const;

  // Ends it, with a reason that `replies` will throw. Nothing where it is done.
  void end(const Fault& reason);
  bool ended() const;

 private:
  friend class Pool;
  void run(headport::Generator& generator);
  void finish(std::vector<headport::Reply> replies, std::optional<Failure> failure);
  bool on_token(const headport_token& token);

  headport::Options options_;  // of the thread that runs it
  const bool streamed_;
  headport::Cancel cancel_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Piece> pieces_;
  bool begun_ = false;
  bool done_ = false;
  std::optional<Failure> reason_;
  std::vector<headport::Reply> replies_;
  std::optional<Failure> failure_;
};

struct Counts {
  std::size_t requests = 0;  // taken
  std::size_t failed = 0;    // of those, also ended ones
  std::size_t new_tokens = 0;
  std::size_t running = 0;
  std::size_t waiting = 0;
};

// Generators on one bundle, and the jobs that wait for one.
class Pool {
 public:
  // Errors: headport::Error where the bundle cannot be opened.
  explicit Pool(const CommandLine& line);
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();

  headport_info info() const { return generators_.front()->info(); }
  // The bundle's own defaults.
  headport::Options options() const { return generators_.front()->options(); }
  // For what may be asked of it at any time, beside calls that run.
  const headport::Generator& generator() const { return *generators_.front(); }

  // Errors: Fault where too many wait, or the service is about to end.
  void submit(const std::shared_ptr<Job>& job);
  Counts counts() const;
  bool closing() const;

  void refuse_more();  // jobs that come now are refused
  void end_all();      // jobs that are there are ended

 private:
  void work(headport::Generator& generator);

  const std::size_t most_waiting_;
  std::vector<std::unique_ptr<headport::Generator>> generators_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> waiting_;
  std::vector<std::shared_ptr<Job>> running_;
  Counts counts_;
  bool closing_ = false;
  bool stopped_ = false;
  std::vector<std::thread> threads_;  // last: they use all of the above
};

}  // namespace service
