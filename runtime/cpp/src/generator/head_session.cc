#include "generator/head_session.h"

#include <algorithm>
#include <cstring>

#include "error.h"
#include "generator/ports.h"

namespace headport::internal {
namespace {

// Each row gathers M rows of the weight, as in src/headport/heads.py.
constexpr std::size_t kCandidateRows = 32;

std::int64_t columns_of(const Bundle& bundle, const Graph& graph, const char* name,
                        const char* dtype) {
  const Port& port = port_of(bundle, graph.outputs, name);
  if (port.dtype == dtype && port.shape.size() == 2 && within(port.shape[1], kLargestDimension)) {
    return port.shape[1];
  }
  throw Error(HEADPORT_BUNDLE_ERROR,
              text(bundle.path().string(), ": ", name, " of type ", dtype,
                   " and shape [rows, columns] were expected"));
}

std::int64_t signed_of(std::size_t size) { return static_cast<std::int64_t>(size); }

}  // namespace

HeadSession::HeadSession(std::shared_ptr<Library> library, const Bundle& bundle,
                         const std::string& name, Threads threads)
    : library_(std::move(library)),
      bundle_(bundle),
      threads_(threads),
      entry_(head_of(bundle, name)) {
  const bool forms = entry_.outputs == "candidates";
  if (forms != entry_.candidates.has_value() || (!forms && entry_.outputs != "logits")) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(bundle.path().string(), ": head '", name, "' was expected to give logits, or "
                     "candidates and what it says of them; it gives ", entry_.outputs));
  }
  if (entry_.transform) {
    throw Error(HEADPORT_UNSUPPORTED,
                text(bundle.path().string(), ": before head '", name, "' comes the graph ",
                     *entry_.transform, ", which this library does not run; run it with the Python "
                     "runtime"));
  }
  read_ports(bundle, name);
  const Graph& graph = graph_of(bundle, entry_.graph);
  session_ = std::make_unique<Session>(library_, bundle.file(graph.file).string(),
                                       bundle.manifest().session_options, threads);
  check_ports(bundle, graph, *session_);
}

void HeadSession::read_ports(const Bundle& bundle, const std::string& name) {
  const Graph& graph = graph_of(bundle, entry_.graph);
  const Port& input = port_of(bundle, graph.inputs, "hidden_states");
  hidden_dtype_ = input.dtype;
  if (input.shape.size() != 2 || !within(input.shape[1], kLargestDimension)) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(bundle.path().string(), ": hidden_states of shape [rows, H] were expected as "
                     "the input of head '", name, "'"));
  }
  hidden_size_ = static_cast<std::size_t>(input.shape[1]);
  hidden_bytes_ = hidden_size_ * element_bytes(hidden_dtype_);
  if (!gives_candidates()) {
    width_ = static_cast<std::size_t>(columns_of(bundle, graph, "logits", "float"));
    return;
  }
  const std::int64_t columns = columns_of(bundle, graph, "quantised_logits", "float");
  const Graph& full = graph_of(bundle, entry_.candidates->full);
  const bool sized = columns == entry_.vocab_size &&
                     columns_of(bundle, graph, "upper_bounds", "float") == columns &&
                     columns_of(bundle, full, "logits", "float") == columns &&
                     columns_of(bundle, graph, "candidate_ids", "int64") == entry_.candidates->count &&
                     columns_of(bundle, graph, "candidate_logits", "double") ==
                         entry_.candidates->count;
  if (!sized || port_of(bundle, full.inputs, "hidden_states").dtype != hidden_dtype_) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(bundle.path().string(), ": the graphs of head '", name,
                     "' do not fit each other or the manifest; quantise the bundle again"));
  }
  width_ = static_cast<std::size_t>(columns);
}

void HeadSession::use(const char* hidden, std::size_t rows) {
  hidden_ = hidden;
  direct_.clear();
  bindings_.clear();
  direct_.resize(rows);
  all_.assign(rows * width_, 0.0f);
  if (!gives_candidates()) return;
  slice_ = std::min(rows, kCandidateRows);
  const auto count = static_cast<std::size_t>(entry_.candidates->count);
  buffers_.hidden.assign(slice_ * hidden_bytes_, 0);
  buffers_.noise.assign(std::max<std::size_t>(1, slice_ * width_), 0.0f);
  buffers_.ids.assign(slice_ * count, 0);
  buffers_.values.assign(slice_ * count, 0.0);
  buffers_.proved.assign(slice_, 0);
  buffers_.cut.assign(slice_, 0.0);
  buffers_.error.assign(slice_, 0.0);
  buffers_.logits.assign(slice_ * width_, 0.0f);
  buffers_.upper.assign(width_, 0.0f);
  ids_.resize(rows * count);
  values_.resize(rows * count);
  for (auto* each : {&cut_, &error_}) each->resize(rows);
  proved_.resize(rows);
}

const float* HeadSession::logits(std::size_t count) {
  auto& binding = direct_[count - 1];
  if (binding == nullptr) {
    binding = std::make_unique<Binding>(*session_);
    const std::int64_t rows = signed_of(count);
    binding->input("hidden_states", const_cast<char*>(hidden_), {rows, signed_of(hidden_size_)},
                   hidden_dtype_);
    binding->output("logits", all_.data(), {rows, signed_of(width_)}, "float");
  }
  binding->run();
  return all_.data();
}

void HeadSession::open_full() {
  if (full_ != nullptr) return;
  const Graph& graph = graph_of(bundle_, entry_.candidates->full);
  full_ = std::make_unique<Session>(library_, bundle_.file(graph.file).string(),
                                    bundle_.manifest().session_options, threads_);
  check_ports(bundle_, graph, *full_);
}

std::unique_ptr<Binding> HeadSession::bind(Wanted wanted, std::size_t count) {
  if (wanted == Wanted::kFull) open_full();
  auto found = std::make_unique<Binding>(wanted == Wanted::kFull ? *full_ : *session_);
  const std::int64_t rows = signed_of(count), columns = signed_of(width_);
  const std::int64_t best = entry_.candidates->count;
  found->input("hidden_states", buffers_.hidden.data(), {rows, signed_of(hidden_size_)},
               hidden_dtype_);
  if (wanted == Wanted::kFull) {
    found->output("logits", buffers_.logits.data(), {rows, columns}, "float");
    return found;
  }
  const bool steered = wanted == Wanted::kSteered;
  found->input("noise", buffers_.noise.data(),
               {steered ? rows : 1, steered ? columns : 1}, "float");
  if (wanted == Wanted::kQuantised || wanted == Wanted::kRescored) {
    found->output("quantised_logits", buffers_.logits.data(), {rows, columns}, "float");
  }
  if (wanted == Wanted::kQuantised) {
    found->output("upper_bounds", buffers_.upper.data(), {rows, columns}, "float");
    return found;
  }
  found->output("candidate_ids", buffers_.ids.data(), {rows, best}, "int64");
  found->output("candidate_logits", buffers_.values.data(), {rows, best}, "double");
  if (wanted == Wanted::kRescored) return found;
  found->output("certified_k", buffers_.proved.data(), {rows}, "int64");
  found->output("cut", buffers_.cut.data(), {rows}, "double");
  found->output("error", buffers_.error.data(), {rows}, "double");
  return found;
}

// One run for up to `slice_` rows.
void HeadSession::run(Wanted wanted, const std::size_t* rows, std::size_t count) {
  for (std::size_t n = 0; n < count; ++n) {
    std::memcpy(buffers_.hidden.data() + n * hidden_bytes_, hidden_ + rows[n] * hidden_bytes_,
                hidden_bytes_);
  }
  auto& binding = bindings_[{wanted, count}];
  if (binding == nullptr) binding = bind(wanted, count);
  binding->run();
}

Candidates HeadSession::pick(RowSpan rows, const float* noise) {
  const auto best = static_cast<std::size_t>(entry_.candidates->count);
  const auto copied = [](const auto& from, std::size_t size, auto& to, std::size_t place) {
    std::copy(from.begin(), from.begin() + signed_of(size), to.begin() + signed_of(place));
  };
  for (std::size_t first = 0; first < rows.size; first += slice_) {
    const std::size_t count = std::min(slice_, rows.size - first);
    buffers_.noise[0] = 0.0f;
    if (noise != nullptr) {
      std::copy(noise + first * width_, noise + (first + count) * width_, buffers_.noise.begin());
    }
    run(noise != nullptr ? Wanted::kSteered : Wanted::kCandidates, rows.data + first, count);
    // Ranks were not picked by logit alone, so the graph's count says nothing.
    if (noise != nullptr) std::fill(buffers_.proved.begin(), buffers_.proved.end(), 0);
    copied(buffers_.ids, count * best, ids_, first * best);
    copied(buffers_.values, count * best, values_, first * best);
    copied(buffers_.proved, count, proved_, first);
    copied(buffers_.cut, count, cut_, first);
    copied(buffers_.error, count, error_, first);
  }
  return {best, ids_.data(), values_.data(), proved_.data(), cut_.data(), error_.data()};
}

QuantisedLogits HeadSession::quantised(std::size_t row) {
  buffers_.noise[0] = 0.0f;
  run(Wanted::kQuantised, &row, 1);
  return {buffers_.logits.data(), buffers_.upper.data()};
}

const float* HeadSession::full(RowSpan rows) {
  for (std::size_t first = 0; first < rows.size; first += slice_) {
    const std::size_t count = std::min(slice_, rows.size - first);
    run(Wanted::kFull, rows.data + first, count);
    std::copy(buffers_.logits.begin(), buffers_.logits.begin() + signed_of(count * width_),
              all_.begin() + signed_of(first * width_));
  }
  return all_.data();
}

const float* HeadSession::rescored(RowSpan rows) {
  const auto best = static_cast<std::size_t>(entry_.candidates->count);
  for (std::size_t first = 0; first < rows.size; first += slice_) {
    const std::size_t count = std::min(slice_, rows.size - first);
    buffers_.noise[0] = 0.0f;
    run(Wanted::kRescored, rows.data + first, count);
    float* found = all_.data() + first * width_;
    std::copy(buffers_.logits.begin(), buffers_.logits.begin() + signed_of(count * width_), found);
    for (std::size_t n = 0; n < count * best; ++n) {
      const auto column = static_cast<std::size_t>(buffers_.ids[n]);
      if (column < width_) {
        found[n / best * width_ + column] = static_cast<float>(buffers_.values[n]);
      }
    }
  }
  return all_.data();
}

}  // namespace headport::internal
