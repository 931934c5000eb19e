#include "generator/in_place_runner.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <numeric>

#include "bundle/ledger.h"
#include "error.h"
#include "generator/ports.h"

namespace headport::internal {
namespace {

// Tokens of a prompt per run: float results depend on it a little, so `prefill_chunk` of
// runtime/generator.py has the same default.
constexpr std::size_t kChunk = 64;
// The attention operator wants room for a chunk's padding behind every row, also behind a full one;
// src/headport/cache_ports.py has the same number.
constexpr std::size_t kSpareSlots = 64;

constexpr const char* kPast = "past_key_values.";
constexpr const char* kPresent = "present.";

constexpr float kLargestHalf = 65504.0f;
constexpr std::int64_t kLargestHeadDimension = std::int64_t{1} << 16;

// Inputs of a step. Of the last two a graph has one: rows with their own numbers of new tokens, which
// attention takes from ONNX Runtime 1.32 on, or positions of rows that have as many as the step.
constexpr const char* kStep[] = {"input_ids", "seqlens_k", "total_sequence_length"};
constexpr const char* kEither[] = {"query_seqlens", "position_ids"};
constexpr std::uint32_t kRaggedRelease = 32;  // 1.N, the first one that knows the former

template <std::size_t count>
bool is_one_of(const std::string& name, const char* const (&names)[count]) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

bool starts_with(const std::string& name, const char* prefix) {
  return name.compare(0, std::strlen(prefix), prefix) == 0;
}

std::size_t cache_slots(std::size_t capacity) { return capacity + std::min(capacity, kSpareSlots); }

const Graph& backbone_of(const Bundle& bundle) {
  for (const auto& [_, graph] : bundle.manifest().graphs) {
    if (graph.role == "backbone") return graph;
  }
  throw Error(HEADPORT_BUNDLE_ERROR, text(bundle.path().string(), ": no backbone in it"));
}

}  // namespace

void InPlaceRunner::Free::operator()(void* memory) const { std::free(memory); }

InPlaceRunner::InPlaceRunner(std::shared_ptr<Library> library, const Bundle& bundle,
                             const std::string& head, Threads threads) {
  const Manifest& manifest = bundle.manifest();
  if (manifest.target != "ort-cpu") {
    throw Error(HEADPORT_UNSUPPORTED,
                text(bundle.path().string(), ": a bundle lowered to ort-cpu was expected, target ",
                     manifest.target, " was found; run `headport lower --target ort-cpu`"));
  }
  const Graph& backbone = backbone_of(bundle);
  read_ports(bundle, backbone);
  if (ragged_ && library->release() < kRaggedRelease) {
    throw Error(HEADPORT_LIBRARY_ERROR,
                text(bundle.path().string(), ": it was lowered for ONNX Runtime 1.", kRaggedRelease,
                     " or newer, release ", library->version(), " was loaded; give the path of a "
                     "newer one, or run `headport lower --onnxruntime-at-least 1.30`"));
  }
  head_ = std::make_unique<HeadSession>(library, bundle, head, threads);
  if (head_->hidden_dtype() != hidden_dtype_ || head_->hidden_size() != hidden_size_) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(bundle.path().string(), ": the head was expected to take what the backbone "
                     "gives, ", hidden_size_, " of ", hidden_dtype_, "; it takes ",
                     head_->hidden_size(), " of ", head_->hidden_dtype()));
  }
  if (static_cast<std::int64_t>(hidden_size_) != manifest.hidden_size) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(bundle.path().string(), ": the manifest says hidden states of ",
                     manifest.hidden_size, " values, the backbone gives ", hidden_size_,
                     "; export the bundle again"));
  }
  backbone_ = std::make_unique<Session>(library, bundle.file(backbone.file).string(),
                                        manifest.session_options, threads);
  check_ports(bundle, backbone, *backbone_);
}

void InPlaceRunner::read_ports(const Bundle& bundle, const Graph& backbone) {
  const std::string where = bundle.path().string();
  for (const Port& port : backbone.inputs) {
    if (is_one_of(port.name, kStep)) continue;
    if (is_one_of(port.name, kEither)) {
      ragged_ = port.name == kEither[0];
      continue;
    }
    if (!starts_with(port.name, kPast)) {
      throw Error(HEADPORT_UNSUPPORTED,
                  text(where, ": this library runs backbones with keys and values alone, input ",
                       port.name, " was found; run this bundle with the Python runtime"));
    }
    Cache cache;
    cache.past = port.name;
    cache.present = kPresent + port.name.substr(std::strlen(kPast));
    cache.dtype = port.dtype;
    if (port.shape.size() != 4 || !within(port.shape[1], kLargestHeadDimension) ||
        !within(port.shape[3], kLargestHeadDimension)) {
      throw Error(HEADPORT_BUNDLE_ERROR,
                  text(where, ": [batch, KV, slots, D] was expected as the shape of ", port.name));
    }
    cache.heads = port.shape[1];
    cache.width = port.shape[3];
    port_of(bundle, backbone.outputs, cache.present);
    caches_.push_back(std::move(cache));
  }
  for (const char* name : kStep) port_of(bundle, backbone.inputs, name);
  port_of(bundle, backbone.inputs, kEither[ragged_ ? 0 : 1]);
  const Port& hidden = port_of(bundle, backbone.outputs, "hidden_states");
  if (hidden.shape.empty() || !within(hidden.shape.back(), kLargestDimension)) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(where, ": a number was expected as the width of hidden_states"));
  }
  hidden_size_ = static_cast<std::size_t>(hidden.shape.back());
  hidden_dtype_ = hidden.dtype;
  hidden_bytes_ = hidden_size_ * element_bytes(hidden.dtype);
}

void InPlaceRunner::reserve(std::size_t rows, std::size_t capacity) {
  if (rows <= rows_ && capacity <= capacity_) return;
  rows = std::max(rows, rows_);
  capacity = std::max(capacity, capacity_);
  // Nothing is left half-made where memory runs out.
  rows_ = capacity_ = 0;
  steps_.clear();
  const std::size_t slots = cache_slots(capacity);
  for (Cache& cache : caches_) {
    cache.row_bytes = static_cast<std::size_t>(cache.heads * cache.width) * slots *
                      element_bytes(cache.dtype);
    cache.data.reset();
    cache.data.reset(static_cast<char*>(std::calloc(rows, cache.row_bytes)));
    if (cache.data == nullptr) throw std::bad_alloc();
  }
  slots_ = static_cast<std::int32_t>(slots);
  ids_.assign(rows, 0);
  seqlens_k_.assign(rows, 0);
  query_seqlens_.assign(rows, 0);
  position_ids_.assign(std::max(rows, kChunk), 0);
  lengths_.assign(rows, 0);
  hidden_.assign(rows * hidden_bytes_, 0);
  old_lengths_.assign(rows, 0);
  steps_.resize(rows);
  head_->use(hidden_.data(), rows);
  rows_ = rows;
  capacity_ = capacity;
}

std::unique_ptr<Binding> InPlaceRunner::bind(std::size_t first, std::size_t count,
                                             std::int64_t* ids, std::size_t length, char* hidden) {
  auto binding = std::make_unique<Binding>(*backbone_);
  const auto rows = static_cast<std::int64_t>(count);
  const auto tokens = static_cast<std::int64_t>(length);
  binding->input("input_ids", ids, {rows, tokens}, "int64");
  binding->input("seqlens_k", seqlens_k_.data() + first, {rows}, "int32");
  if (ragged_) {
    binding->input("query_seqlens", query_seqlens_.data() + first, {rows}, "int32");
  } else {
    binding->input("position_ids", position_ids_.data(), {rows, tokens}, "int64");
  }
  binding->input("total_sequence_length", &total_sequence_length_, {}, "int32");
  binding->output("hidden_states", hidden,
                  {rows, tokens, static_cast<std::int64_t>(hidden_size_)}, hidden_dtype_);
  for (Cache& cache : caches_) {
    char* data = cache.data.get() + first * cache.row_bytes;
    const std::vector<std::int64_t> shape = {rows, cache.heads, slots_, cache.width};
    binding->input(cache.past, data, shape, cache.dtype);
    binding->output(cache.present, data, shape, cache.dtype);
  }
  return binding;
}

void InPlaceRunner::begin(std::size_t row, IdSpan tokens) {
  lengths_[row] = 0;
  std::vector<std::int64_t> ids;
  std::vector<char> hidden;
  for (std::size_t start = 0; start < tokens.size; start += kChunk) {
    const std::size_t length = std::min(kChunk, tokens.size - start);
    ids.assign(tokens.data + start, tokens.data + start + length);
    hidden.resize(length * hidden_bytes_);
    lengths_[row] += length;
    query_seqlens_[row] = static_cast<std::int32_t>(length);
    seqlens_k_[row] = static_cast<std::int32_t>(lengths_[row] - 1);
    std::iota(position_ids_.begin(), position_ids_.begin() + static_cast<std::ptrdiff_t>(length),
              static_cast<std::int64_t>(start));
    total_sequence_length_ = ragged_ ? slots_ : static_cast<std::int32_t>(lengths_[row]);
    bind(row, 1, ids.data(), length, hidden.data())->run();
  }
  std::memcpy(hidden_of(row), hidden.data() + hidden.size() - hidden_bytes_, hidden_bytes_);
}

void InPlaceRunner::step(const std::int64_t* tokens, std::size_t count) {
  auto& binding = steps_[count - 1];
  if (binding == nullptr) binding = bind(0, count, ids_.data(), 1, hidden_.data());
  std::size_t longest = 0;
  for (std::size_t row = 0; row < count; ++row) {
    ids_[row] = tokens[row];
    query_seqlens_[row] = 1;
    seqlens_k_[row] = static_cast<std::int32_t>(lengths_[row]);
    position_ids_[row] = static_cast<std::int64_t>(lengths_[row]);
    longest = std::max(longest, ++lengths_[row]);
  }
  total_sequence_length_ = ragged_ ? slots_ : static_cast<std::int32_t>(longest);
  binding->run();
}

void InPlaceRunner::add(std::size_t row, const float* vector) {
  const bool half = hidden_dtype_ == "float16";
  if (!half && hidden_dtype_ != "float") {
    throw Error(HEADPORT_UNSUPPORTED, text("a condition is added to hidden states of type float or "
                                           "float16, the backbone gives ", hidden_dtype_));
  }
  char* place = hidden_of(row);
  for (std::size_t n = 0; n < hidden_size_; ++n) {
    float sum = 0.0f;
    std::uint16_t narrow = 0;
    char* element = place + n * (half ? sizeof narrow : sizeof sum);
    if (half) {
      std::memcpy(&narrow, element, sizeof narrow);
      sum = static_cast<float>(from_half(narrow)) + vector[n];
      narrow = to_half(static_cast<double>(sum));
      std::memcpy(element, &narrow, sizeof narrow);
    } else {
      std::memcpy(&sum, element, sizeof sum);
      sum += vector[n];
      std::memcpy(element, &sum, sizeof sum);
    }
    if (std::isfinite(sum) && (!half || std::abs(sum) <= kLargestHalf)) continue;
    throw Error(HEADPORT_NON_FINITE_ERROR,
                text("hidden state ", n, " and its condition give ", sum, ", beyond ", hidden_dtype_,
                     "; give a smaller condition, or use a bundle of float32"));
  }
}

std::size_t InPlaceRunner::held_bytes(const Cache& cache, std::size_t row) const {
  return lengths_[row] * static_cast<std::size_t>(cache.width) * element_bytes(cache.dtype);
}

void InPlaceRunner::copy(std::size_t source, std::size_t target) {
  lengths_[target] = lengths_[source];
  for (Cache& cache : caches_) {
    const std::size_t head_bytes = cache.row_bytes / static_cast<std::size_t>(cache.heads);
    for (std::size_t head = 0; head < static_cast<std::size_t>(cache.heads); ++head) {
      const std::size_t place = head * head_bytes;
      std::memcpy(cache.data.get() + target * cache.row_bytes + place,
                  cache.data.get() + source * cache.row_bytes + place, held_bytes(cache, source));
    }
  }
}

void InPlaceRunner::reorder(RowSpan sources) {
  old_lengths_.assign(lengths_.begin(), lengths_.end());
  for (std::size_t row = 0; row < sources.size; ++row) lengths_[row] = old_lengths_[sources[row]];
  for (Cache& cache : caches_) {
    const std::size_t head_bytes = cache.row_bytes / static_cast<std::size_t>(cache.heads);
    const auto heads = static_cast<std::size_t>(cache.heads);
    // A source may itself be overwritten, so what moves goes through memory of its own.
    spare_.resize(std::max(spare_.size(), sources.size * cache.row_bytes));
    const auto move = [&](std::size_t row, const char* from, char* to) {
      for (std::size_t head = 0; head < heads; ++head) {
        std::memcpy(to + head * head_bytes, from + head * head_bytes, held_bytes(cache, row));
      }
    };
    for (std::size_t row = 0; row < sources.size; ++row) {
      if (sources[row] == row) continue;
      move(row, cache.data.get() + sources[row] * cache.row_bytes,
           spare_.data() + row * cache.row_bytes);
    }
    for (std::size_t row = 0; row < sources.size; ++row) {
      if (sources[row] == row) continue;
      move(row, spare_.data() + row * cache.row_bytes, cache.data.get() + row * cache.row_bytes);
    }
  }
}

}  // namespace headport::internal
