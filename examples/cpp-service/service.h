// The addresses of the service, and what stands behind them.
#pragma once

#include <httplib.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "command_line.h"
#include "job.h"
#include "request.h"
#include "texts.h"

namespace service {

class Service {
 public:
  // `pool` must outlive the server's last answer.
  Service(Pool& pool, const CommandLine& line)
      : pool_(pool), line_(line), texts_(pool.generator(), line.bundle) {}
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // Sets the server's addresses and limits; the service must outlive it.
  void attach(httplib::Server& server);

  const Texts& texts() const { return texts_; }
  // Requests that a generator works for, and streams that are still being sent.
  std::size_t open() const { return open_.load(); }

 private:
  class Exchange;

  void health(httplib::Response& response) const;
  void models(httplib::Response& response) const;
  void model(const std::string& name, httplib::Response& response) const;
  void completions(const httplib::Request& request, httplib::Response& response,
                   const httplib::ContentReader& reader);
  std::string body_of(const httplib::ContentReader& reader) const;
  void check_model(const std::string& name) const;

  Pool& pool_;
  const CommandLine& line_;
  const Texts texts_;
  std::atomic<std::size_t> open_{0};
};

}  // namespace service
