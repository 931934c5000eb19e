#include "job.h"

#include <algorithm>

namespace service {
namespace {

headport::Likelihood likelihood_of(const headport_likelihood& given) {
  headport::Likelihood found{given.logprob, given.processed_logprob, {}};
  for (std::size_t n = 0; n < given.top_count; ++n) {
    found.top.push_back({given.top[n].token_id, given.top[n].logprob});
  }
  return found;
}

Fault about_to_end() {
  return Fault(503, "unavailable_error", "the service is about to end; ask another one");
}

headport_settings settings_of(const CommandLine& line, std::vector<const char*>& ignore) {
  headport_settings settings = headport::default_settings();
  if (!line.onnxruntime.empty()) settings.onnxruntime = line.onnxruntime.c_str();
  if (!line.tokenizer.empty()) settings.tokenizer = line.tokenizer.c_str();
  settings.max_context = line.max_context;
  settings.reply_limit = line.limits.new_tokens;
  const auto cpus = static_cast<std::int64_t>(std::thread::hardware_concurrency());
  const std::int64_t share = line.workers > 1 ? std::max(cpus / line.workers, std::int64_t{1}) : 0;
  settings.threads = static_cast<std::int32_t>(line.threads > 0 ? line.threads : share);
  for (const std::string& name : line.ignore) ignore.push_back(name.c_str());
  settings.ignore = ignore.data();
  settings.ignore_count = ignore.size();
  return settings;
}

}  // namespace

bool Job::wait(std::chrono::milliseconds time) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, time, [&] { return done_ || !pieces_.empty(); });
}

bool Job::begun() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return begun_ || done_;
}

bool Job::done() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

std::optional<Piece> Job::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (pieces_.empty()) return std::nullopt;
  Piece found = std::move(pieces_.front());
  pieces_.pop_front();
  return found;
}

const std::vector<headport::Reply>& Job::replies() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (reason_.has_value()) reason_->raise();
  if (failure_.has_value()) failure_->raise();
  return replies_;
}

void Job::end(const Fault& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (done_ || reason_.has_value()) return;
    reason_.emplace(reason);
  }
  cancel_.request();
}

bool Job::ended() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reason_.has_value();
}

bool Job::on_token(const headport_token& token) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!streamed_) return !reason_.has_value();
  Piece piece{token.prompt * static_cast<std::size_t>(options_.n) + token.sample, token.token_id,
              token.finish, {}, {}};
  if (token.text != nullptr) piece.text.assign(token.text, token.text_size);
  if (token.likelihood != nullptr) piece.likelihoods = {likelihood_of(*token.likelihood)};
  pieces_.push_back(std::move(piece));
  begun_ = true;
  changed_.notify_all();
  return !reason_.has_value();
}

void Job::run(headport::Generator& generator) {
  options_.set_cancel(cancel_);
  options_.set_on_token([this](const headport_token& token) { return on_token(token); });
  try {
    finish(generator.generate(prompts, options_), std::nullopt);
  } catch (...) {
    finish({}, Failure(fault_of(std::current_exception())));
  }
}

void Job::finish(std::vector<headport::Reply> replies, std::optional<Failure> failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // One that was ended in its last moment is done all the same.
  if (!failure) reason_.reset();
  replies_ = std::move(replies);
  failure_ = std::move(failure);
  done_ = true;
  changed_.notify_all();
}

Pool::Pool(const CommandLine& line) : most_waiting_(static_cast<std::size_t>(line.limits.waiting)) {
  std::vector<const char*> ignore;
  headport_settings settings = settings_of(line, ignore);
  for (std::int64_t n = 0; n < line.workers; ++n) {
    generators_.push_back(std::make_unique<headport::Generator>(line.bundle, settings));
    settings.verify = 0;  // the files were compared with their checksums once
  }
  for (auto& each : generators_) {
    threads_.emplace_back([this, &generator = *each] { work(generator); });
  }
}

Pool::~Pool() {
  refuse_more();
  end_all();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  for (std::thread& each : threads_) each.join();
}

void Pool::submit(const std::shared_ptr<Job>& job) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closing_) throw about_to_end();
  const auto gone = std::remove_if(waiting_.begin(), waiting_.end(),
                                   [](const auto& each) { return each->ended(); });
  counts_.failed += static_cast<std::size_t>(waiting_.end() - gone);
  waiting_.erase(gone, waiting_.end());
  if (waiting_.size() >= most_waiting_) {
    throw Fault(429, "overloaded_error",
                std::to_string(waiting_.size()) + " requests wait, more are not taken; try later");
  }
  ++counts_.requests;
  waiting_.push_back(job);
  changed_.notify_one();
}

Counts Pool::counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Counts found = counts_;
  found.running = running_.size();
  found.waiting = waiting_.size();
  return found;
}

bool Pool::closing() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return closing_;
}

void Pool::refuse_more() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closing_ = true;
}

void Pool::end_all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& each : waiting_) each->end(about_to_end());
  for (const auto& each : running_) each->end(about_to_end());
}

void Pool::work(headport::Generator& generator) {
  while (true) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return stopped_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      job = waiting_.front();
      waiting_.pop_front();
      running_.push_back(job);
    }
    job->run(generator);  // at once where it was ended while it waited: it is cancelled
    std::size_t tokens = 0;
    bool failed = false;
    try {
      for (const headport::Reply& reply : job->replies()) tokens += reply.token_ids.size();
    } catch (...) {
      failed = true;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.new_tokens += tokens;
    if (failed) ++counts_.failed;
    running_.erase(std::find(running_.begin(), running_.end(), job));
  }
}

}  // namespace service
