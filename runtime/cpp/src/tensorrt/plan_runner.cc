#include "tensorrt/plan_runner.h"

#include <algorithm>
#include <cstring>

#include "bundle/ledger.h"
#include "error.h"
#include "generator/ports.h"
#include "ort/session.h"

namespace headport::internal {
namespace {

constexpr const char* kIds = "input_ids";
constexpr const char* kMask = "attention_mask";
constexpr const char* kHidden = "hidden_states";
constexpr const char* kLogits = "logits";
constexpr const char* kPast = "past_key_values.";
constexpr const char* kPresent = "present.";

std::int64_t signed_of(std::size_t size) { return static_cast<std::int64_t>(size); }

// The last dimension of a port, where it is a number.
std::size_t width_of(const Plan& plan, const EnginePort& port) {
  if (!port.shape.empty() && within(port.shape.back(), kLargestDimension)) {
    return static_cast<std::size_t>(port.shape.back());
  }
  throw Error(HEADPORT_BUNDLE_ERROR, text(plan.file(), ": a number was expected as the width of ",
                                          port.name, "; build it again with `headport engine`"));
}

}  // namespace

PlanRunner::PlanRunner(std::unique_ptr<Device> device, std::unique_ptr<Plan> backbone,
                       std::unique_ptr<Plan> head)
    : device_(std::move(device)), backbone_(std::move(backbone)), head_(std::move(head)) {
  read_caches();
  read_sizes();
}

void PlanRunner::read_caches() {
  backbone_->input(kIds);
  backbone_->input(kMask);
  for (const std::string& name : backbone_->names(true)) {
    if (name == kIds || name == kMask) continue;
    if (name.rfind(kPast, 0) != 0) {
      throw Error(HEADPORT_UNSUPPORTED,
                  text(backbone_->file(), ": this library runs backbones with keys and values alone, "
                       "input ", name, " was found; run this bundle with the Python runtime"));
    }
    const EnginePort& past = backbone_->input(name);
    const EnginePort& present = backbone_->output(kPresent + name.substr(std::strlen(kPast)));
    if (past.shape.size() != 4 || !within(past.shape[1], kLargestDimension) ||
        !within(past.shape[3], kLargestDimension) || present.dtype != past.dtype) {
      throw Error(HEADPORT_BUNDLE_ERROR,
                  text(backbone_->file(), ": [batch, KV, tokens, D] was expected as the shape of ",
                       name, ", and its type as that of ", present.name));
    }
    Cache cache;
    cache.past = name;
    cache.present = present.name;
    cache.heads = past.shape[1];
    cache.width = past.shape[3];
    cache.token_bytes = array_bytes({cache.heads, cache.width}, past.dtype);
    caches_.push_back(std::move(cache));
  }
}

void PlanRunner::read_sizes() {
  const EnginePort& hidden = backbone_->output(kHidden);
  const EnginePort& logits = head_->output(kLogits);
  const EnginePort& taken = head_->input(kHidden);
  hidden_size_ = width_of(*backbone_, hidden);
  hidden_bytes_ = hidden_size_ * element_bytes(hidden.dtype);
  width_ = width_of(*head_, logits);
  if (taken.dtype != hidden.dtype || width_of(*head_, taken) != hidden_size_) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(head_->file(), ": it was expected to take what the backbone gives, ",
                     hidden_size_, " of ", hidden.dtype, "; it takes ", taken.dtype,
                     "; build both again with `headport engine`"));
  }
  if (logits.dtype != "float" && logits.dtype != "float16") {
    throw Error(HEADPORT_UNSUPPORTED, text(head_->file(), ": logits of type float or float16 were "
                                           "expected, ", logits.dtype, " were found"));
  }
  const Plan::Shapes single = {{kIds, {1, 1}}};
  if (!backbone_->fits(single)) {
    throw Error(HEADPORT_UNSUPPORTED,
                text(backbone_->file(), ": a profile of single tokens of one row was expected, none "
                     "is there; build it again with `headport engine --profile batch=1:… "
                     "sequence=1:…`"));
  }
  const std::int64_t past =
      caches_.empty() ? kLargestDimension : backbone_->largest(caches_[0].past, 2, single);
  max_context_ = past + 1;
}

void PlanRunner::reserve(std::size_t rows, std::size_t capacity) {
  if (rows <= rows_.size() && capacity <= capacity_) return;
  rows = std::max(rows, rows_.size());
  capacity = std::max(capacity, capacity_);
  // Nothing is left half-made where memory runs out.
  rows_.clear();
  old_rows_.clear();
  capacity_ = 0;
  for (Cache& cache : caches_) {
    cache.pool.reset();
    cache.pool = std::make_unique<BlockPool>(*device_, cache.token_bytes * capacity);
  }
  hidden_.assign(rows * hidden_bytes_, 0);
  logits_.assign(rows * width_, 0.0f);
  rows_.resize(rows);
  capacity_ = capacity;
}

// Tokens that one run takes behind `past` ones; 0 where no profile takes any.
std::size_t PlanRunner::longest_step(std::size_t past, std::size_t left) const {
  for (std::size_t count = left; count > 0; --count) {
    Plan::Shapes shapes = {{kIds, {1, signed_of(count)}}, {kMask, {1, signed_of(past + count)}}};
    if (!caches_.empty()) {
      const Cache& first = caches_[0];
      shapes[first.past] = {1, first.heads, signed_of(past), first.width};
    }
    if (backbone_->fits(shapes)) return count;
  }
  return 0;
}

void PlanRunner::begin(std::size_t row, IdSpan tokens) {
  rows_[row] = {};
  for (const Cache& cache : caches_) rows_[row].caches.push_back(cache.pool->get());
  for (std::size_t done = 0; done < tokens.size;) {
    // Where no profile takes any, the run of all says so.
    std::size_t count = longest_step(done, tokens.size - done);
    if (count == 0) count = tokens.size - done;
    append(row, tokens.data + done, count);
    done += count;
  }
}

void PlanRunner::append(std::size_t row, const std::int64_t* tokens, std::size_t count) {
  const std::size_t past = rows_[row].length, length = past + count;
  std::map<std::string, OnDevice> feeds;
  feeds[kIds] = backbone_->upload_ids(kIds, {tokens, tokens + count}, {1, signed_of(count)});
  feeds[kMask] = backbone_->upload_ids(kMask, std::vector<std::int64_t>(length, 1),
                                       {1, signed_of(length)});
  Row grown;
  grown.length = length;
  std::map<std::string, OnDevice> places;  // with the shapes that there is room for
  for (std::size_t n = 0; n < caches_.size(); ++n) {
    const Cache& cache = caches_[n];
    feeds[cache.past] = {rows_[row].caches[n].get(), {1, cache.heads, signed_of(past), cache.width}};
    grown.caches.push_back(cache.pool->get());
    places[cache.present] = {grown.caches.back().get(),
                             {1, cache.heads, signed_of(length), cache.width}};
  }
  const auto place = [&](const std::string& name, const Shape& shape) -> void* {
    const auto found = places.find(name);
    if (found == places.end()) return nullptr;
    if (shape == found->second.shape && length <= capacity_) return found->second.address;
    throw Error(HEADPORT_LIBRARY_ERROR,
                text(backbone_->file(), ": ", name, " was expected to hold ", length, " tokens"));
  };
  const OnDevice hidden = backbone_->run(feeds, place).at(kHidden);
  const auto* last = static_cast<const char*>(hidden.address) + (count - 1) * hidden_bytes_;
  device_->download(hidden_.data() + row * hidden_bytes_, last, hidden_bytes_);
  // Only after the run, so that a run that failed leaves the row as it was.
  rows_[row] = std::move(grown);
}

void PlanRunner::step(const std::int64_t* tokens, std::size_t count) {
  for (std::size_t row = 0; row < count; ++row) append(row, tokens + row, 1);
}

const float* PlanRunner::logits(std::size_t count) {
  for (std::size_t first = 0; first < count;) {
    std::size_t rows = count - first;
    while (rows > 1 && !head_->fits({{kHidden, {signed_of(rows), signed_of(hidden_size_)}}})) --rows;
    const OnDevice hidden = head_->upload(kHidden, hidden_.data() + first * hidden_bytes_,
                                          {signed_of(rows), signed_of(hidden_size_)});
    const auto place = [](const std::string&, const Shape&) -> void* { return nullptr; };
    const OnDevice found = head_->run({{kHidden, hidden}}, place).at(kLogits);
    found_.resize(array_bytes({signed_of(rows), signed_of(width_)}, head_->output(kLogits).dtype));
    device_->download(found_.data(), found.address, found_.size());
    convert_logits(found_.data(), rows * width_, logits_.data() + first * width_);
    first += rows;
  }
  return logits_.data();
}

void PlanRunner::convert_logits(const char* found, std::size_t count, float* to) const {
  if (head_->output(kLogits).dtype == "float") {
    std::memcpy(to, found, count * sizeof *to);
    return;
  }
  for (std::size_t n = 0; n < count; ++n) {
    std::uint16_t half = 0;
    std::memcpy(&half, found + n * sizeof half, sizeof half);
    to[n] = static_cast<float>(from_half(half));
  }
}

void PlanRunner::copy(std::size_t source, std::size_t target) { rows_[target] = rows_[source]; }

void PlanRunner::reorder(RowSpan sources) {
  old_rows_ = rows_;
  for (std::size_t row = 0; row < sources.size; ++row) rows_[row] = old_rows_[sources[row]];
  old_rows_.clear();  // so that blocks nobody needs any more go back
}

}  // namespace headport::internal
