#include "service.h"

#include <nlohmann/json.hpp>
#include <sstream>

#include "answer.h"
#include "connection.h"
#include "fault.h"

namespace service {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

constexpr const char* kJson = "application/json";
constexpr const char* kAddresses = "GET /health, GET /v1/models, POST /v1/completions";
constexpr milliseconds kGlance{50};  // between looks at the clock and at the client
constexpr std::size_t kSpareThreads = 8;  // for /health and for refusals while all others wait
// Of a body that is too long this many times its limit is read before the connection is closed:
// a client that still writes would not see the answer.
constexpr std::int64_t kPatience = 16;

void answer_fault(const Fault& fault, httplib::Response& response) {
  response.status = fault.status();
  if (fault.status() == 429 || fault.status() == 503) response.set_header("Retry-After", "1");
  response.set_content(error_body(fault), kJson);
}

template <typename Work>
void guarded(httplib::Response& response, Work work) {
  try {
    work();
  } catch (...) {
    answer_fault(fault_of(std::current_exception()), response);
  }
}

json model_of(const std::string& name) {
  return {{"id", name}, {"object", "model"}, {"created", 0}, {"owned_by", "headport"}};
}

std::string event(const std::string& document) { return "data: " + document + "\n\n"; }

}  // namespace

// One request that a generator works for. Dropping it ends the work.
class Service::Exchange {
 public:
  Exchange(Service& service, const httplib::Request& request, Asked asked)
      : service_(service),
        connection_(request),
        answer_(service.line_.name, asked, service.texts_),
        usage_part_(asked.usage_part),
        job_(std::make_shared<Job>(std::move(asked.prompts), std::move(asked.options),
                                   asked.stream)),
        deadline_(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(service.line_.limits.seconds))) {
    ++service_.open_;
  }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  ~Exchange() {
    job_->end(Fault(499, "cancelled_error", "the client left before its answer was there"));
    --service_.open_;
  }

  void submit() { service_.pool_.submit(job_); }

  // Errors: Fault, or what the generator threw.
  std::string whole() {
    while (!job_->done()) look();
    return answer_.whole(job_->prompts, job_->replies());
  }

  // Waits for the first token: until then, what is wrong is told with a status of its own.
  void begin() {
    while (!job_->begun()) look();
    if (job_->done()) job_->replies();
  }

  // Sends what there is, or waits for it. False ends the connection.
  bool send(httplib::DataSink& sink) {
    try {
      look();
      const bool done = job_->done();  // before the last tokens are taken: none follows
      while (const std::optional<Piece> piece = job_->take()) {
        const std::string part = answer_.part(*piece);
        if (!part.empty() && !write(sink, event(part))) return false;
      }
      if (!done) return true;
      const auto& replies = job_->replies();
      if (usage_part_ && !write(sink, event(answer_.usage_part(job_->prompts, replies)))) {
        return false;
      }
      if (!write(sink, event("[DONE]"))) return false;
    } catch (...) {  // the status has been sent; the stream tells instead
      if (!write(sink, event(error_body(fault_of(std::current_exception()))))) return false;
    }
    sink.done();
    return true;
  }

 private:
  static bool write(httplib::DataSink& sink, const std::string& text) {
    return sink.is_writable() && sink.write(text.data(), text.size());
  }

  // Waits a moment for news. Errors: Fault where the client has left or the time is over.
  void look() {
    if (job_->wait(kGlance)) return;
    if (connection_.has_gone()) throw Fault(499, "cancelled_error", "the client has left");
    if (Clock::now() > deadline_) {
      std::ostringstream message;
      message << "the request was not done after " << service_.line_.limits.seconds << " seconds";
      const Fault late(504, "timeout_error", message.str());
      job_->end(late);
      throw late;
    }
    // One that was ended while it waited need not wait for its turn.
    if (job_->ended()) job_->replies();
  }

  Service& service_;
  const Connection connection_;
  const Answer answer_;
  const bool usage_part_;
  const std::shared_ptr<Job> job_;
  const Clock::time_point deadline_;
};

void Service::attach(httplib::Server& server) {
  const auto threads = static_cast<std::size_t>(line_.limits.waiting + line_.workers);
  server.new_task_queue = [threads] { return new httplib::ThreadPool(threads + kSpareThreads); };
  // One request for each connection: an idle one would hold a thread, and what is left of a body
  // that was refused is never taken for the next request.
  server.set_keep_alive_max_count(1);
  server.set_tcp_nodelay(true);
  server.Get("/health", [this](const httplib::Request&, httplib::Response& response) {
    guarded(response, [&] { health(response); });
  });
  server.Get("/v1/models", [this](const httplib::Request&, httplib::Response& response) {
    guarded(response, [&] { models(response); });
  });
  server.Get("/v1/models/(.+)", [this](const httplib::Request& request,
                                       httplib::Response& response) {
    guarded(response, [&] { model(request.matches[1], response); });
  });
  server.Post("/v1/completions", [this](const httplib::Request& request,
                                        httplib::Response& response,
                                        const httplib::ContentReader& reader) {
    guarded(response, [&] { completions(request, response, reader); });
  });
  server.set_error_handler([](const httplib::Request& request, httplib::Response& response) {
    if (!response.body.empty()) return;  // of a handler above
    const bool unknown = response.status == 404;
    const std::string what = unknown ? "not found" : "the request cannot be read";
    answer_fault(Fault(response.status, "invalid_request_error",
                       request.method + " " + request.path + ": " + what +
                           "; the service has " + kAddresses),
                 response);
  });
}

void Service::health(httplib::Response& response) const {
  if (pool_.closing()) {
    response.status = 503;
    response.set_content(json{{"status", "closed"}}.dump(), kJson);
    return;
  }
  const Counts counts = pool_.counts();
  const json stats = {{"requests", counts.requests}, {"failed", counts.failed},
                      {"new_tokens", counts.new_tokens}, {"running", counts.running},
                      {"waiting", counts.waiting}, {"workers", line_.workers}};
  response.set_content(json{{"status", "ok"}, {"model", line_.name}, {"stats", stats}}.dump(),
                       kJson);
}

void Service::models(httplib::Response& response) const {
  const json own = json::array({model_of(line_.name)});
  response.set_content(json{{"object", "list"}, {"data", own}}.dump(), kJson);
}

void Service::model(const std::string& name, httplib::Response& response) const {
  check_model(name);
  response.set_content(model_of(name).dump(), kJson);
}

void Service::check_model(const std::string& name) const {
  if (name == line_.name) return;
  throw Fault(404, "invalid_request_error", "model '" + line_.name + "' is served here, " +
                                                (name.empty() ? "none" : "'" + name + "'") +
                                                " was asked for");
}

std::string Service::body_of(const httplib::ContentReader& reader) const {
  const std::int64_t limit = line_.limits.body_bytes;
  const auto deadline = Clock::now() + std::chrono::duration<double>(line_.limits.seconds);
  std::string body;
  std::int64_t size = 0;
  const bool complete = reader([&](const char* data, std::size_t count) {
    size += static_cast<std::int64_t>(count);
    if (size <= limit) body.append(data, count);
    return size / kPatience <= limit && Clock::now() < deadline;
  });
  if (size > limit) {
    throw Fault(413, "invalid_request_error", "a body of at most " + std::to_string(limit) +
                                                  " bytes was expected, more came");
  }
  if (!complete) throw wrong_request("the body broke off, or took too long");
  return body;
}

void Service::completions(const httplib::Request& request, httplib::Response& response,
                          const httplib::ContentReader& reader) {
  if (request.is_multipart_form_data()) {
    throw wrong_request("the body must be a JSON object: a form came");
  }
  Asked asked = read_completion(body_of(reader), pool_.options(), texts_, line_.limits);
  check_model(asked.model);
  const bool stream = asked.stream;
  const auto exchange = std::make_shared<Exchange>(*this, request, std::move(asked));
  exchange->submit();
  if (!stream) {
    response.set_content(exchange->whole(), kJson);
    return;
  }
  exchange->begin();
  response.set_chunked_content_provider(
      "text/event-stream",
      [exchange](std::size_t, httplib::DataSink& sink) { return exchange->send(sink); });
}

}  // namespace service
