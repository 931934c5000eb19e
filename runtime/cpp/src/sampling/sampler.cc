#include "sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "error.h"
#include "sampling/draw.h"
#include "sampling/filters.h"
#include "sampling/largest.h"
#include "sampling/nucleus.h"
#include "sampling/processors.h"

namespace headport::internal {
namespace {

// Temperatures whose inverse float32 holds with room to spare.
constexpr double kColdest = 1e-6;
constexpr double kHottest = 1e6;

}  // namespace

Sampler::Sampler(const Columns& columns) : columns_(columns) {
  const std::size_t size = columns.size();
  tally_.resize(size);
  mask_.resize(size);
  processed_.resize(size);
  scores_.reserve(size);
  best_.reserve(size);
}

void Sampler::refuse_not_finite(const float* logits, const Context& context) const {
  const std::size_t size = columns_.size();
  if (all_finite(logits, size)) return;
  std::size_t count = 0, first = size;
  for (std::size_t n = size; n-- > 0;) {
    if (std::isfinite(logits[n])) continue;
    ++count;
    first = n;
  }
  throw Error(HEADPORT_NON_FINITE_ERROR,
              text("prompt ", context.index, ", step ", context.tokens.size, ": ", count, " of ",
                   size, " logits are not finite (first at position ", first, ": ", logits[first],
                   "); the bundle or its input is broken, `headport inspect BUNDLE --selftest` "
                   "tells which"));
}

// All processors on `processed_`; gives whether the rules before `allowed` were overruled.
bool Sampler::apply(const Sampling& sampling, const AllowedAnswer& allowed,
                    const Context& context) {
  if (!processing(sampling)) return false;
  Row row{processed_.data(), columns_, sampling, context, allowed, tally_, sums_, mask_, identities_};
  apply_processors(row);
  return row.overruled;
}

const std::vector<double>& Sampler::process(const float* logits, const Sampling& sampling,
                                            const AllowedAnswer& allowed, const Context& context) {
  std::copy(logits, logits + columns_.size(), processed_.begin());
  apply(sampling, allowed, context);
  return processed_;
}

Sampler::Processed Sampler::process_log_softmax(const float* logits, const Sampling& sampling,
                                                const AllowedAnswer& allowed,
                                                const Context& context) {
  const std::size_t size = columns_.size();
  const double best = static_cast<double>(largest(logits, size));
  double total = 0.0;
  for (std::size_t n = 0; n < size; ++n) {
    processed_[n] = logits[n] - best;
    total += std::exp(processed_[n]);
  }
  const double shift = std::log(total);
  for (double& each : processed_) each -= shift;
  const bool overruled = apply(sampling, allowed, context);
  return {processed_, overruled};
}

Sampler::Processed Sampler::process_nothing(const Sampling& sampling, const AllowedAnswer& allowed,
                                            const Context& context) {
  std::fill(processed_.begin(), processed_.end(), 0.0);
  const bool overruled = apply(sampling, allowed, context);
  return {processed_, overruled};
}

// A number that no score which the filters keep is below; above -inf.
template <typename T>
T Sampler::least_of(const T* scores, const Sampling& sampling) {
  const std::size_t size = columns_.size();
  const auto k = static_cast<std::size_t>(sampling.top_k);
  constexpr T kLowest = std::numeric_limits<T>::lowest();
  if (sampling.temperature == 0.0) return kLowest;
  if (k > 0 && k < size) {
    const double least = kth_largest(scores, size, k, scores_.runs, scores_.heap);
    return std::max(kLowest, static_cast<T>(least));
  }
  if (sampling.min_p > 0.0 && sampling.top_p == 1.0) {  // which would need all that min-p removes
    const double best = *std::max_element(scores_.runs.begin(), scores_.runs.end());
    const double least = best + sampling.temperature * std::log(sampling.min_p);
    // Lower by far more than the rounding of either side.
    const double slack = 1e-6 * (1.0 + std::abs(best) + std::abs(least));
    return std::max(kLowest, static_cast<T>(least - slack));
  }
  return kLowest;
}

// Takes up a row's scores but those that are banned or that the first filter surely removes.
template <typename T>
void Sampler::collect(const T* scores, const Sampling& sampling, const Context& context) {
  const std::size_t size = columns_.size();
  largest_of_runs(scores, size, scores_.runs);
  const T least = least_of(scores, sampling);
  scores_.clear();
  for_each_from(scores, size, scores_.runs, least,
                [&](std::size_t n) { scores_.add(scores[n], columns_.id(n)); });
  if (scores_.size() == 0) refuse_banned(context);
}

// As `collect`, and what the filters keep of it.
template <typename T>
void Sampler::collect_kept(const T* scores, const Sampling& sampling, const Context& context) {
  const char* first = first_filter(sampling);
  if (first != nullptr && std::strcmp(first, "top_p") == 0) {
    if (nucleus(scores, columns_.size(), columns_, sampling.temperature, sampling.top_p, scores_)) {
      keep(scores_, sampling, first);
      return;
    }
    ++sorted_rows_;
  }
  collect(scores, sampling, context);
  keep(scores_, sampling);
}

void Sampler::refuse_banned(const Context& context) {
  throw Error(HEADPORT_REQUEST_ERROR,
              text("prompt ", context.index, ", step ", context.tokens.size,
                   ": the request's rules ban every token; loosen bad_words, suppress_tokens, "
                   "no_repeat_ngram_size, allowed or min_length"));
}

std::int64_t Sampler::draw(const Sampling& sampling, const NoiseKey& key) const {
  const std::size_t place = draw_from(scores_.values.data(), scores_.ids.data(), scores_.size(),
                                      sampling.temperature, key);
  return scores_.ids[place];
}

std::int64_t Sampler::choose(const float* logits, const Sampling& sampling,
                             const AllowedAnswer& allowed, const NoiseKey& key,
                             const Context& context) {
  refuse_not_finite(logits, context);
  const std::size_t size = columns_.size();
  const double temperature = sampling.temperature;
  processed_acts_ = processing(sampling);
  if (processed_acts_) {
    process(logits, sampling, allowed, context);
    const std::size_t place = argmax(processed_.data(), size);
    if (processed_[place] == kBanned) refuse_banned(context);
    if (temperature == 0.0) return columns_.id(place);
    collect_kept(processed_.data(), sampling, context);
  } else {
    if (temperature == 0.0) return columns_.id(argmax(logits, size));
    const bool all = !filtering(sampling) && columns_.ids() == nullptr;
    if (all && temperature >= kColdest && temperature <= kHottest) {
      return columns_.id(draw_from_row(logits, size, temperature, key));
    }
    collect_kept(logits, sampling, context);
  }
  return draw(sampling, key);
}

Likelihood Sampler::likelihood(std::int64_t token_id, const float* logits,
                               const Sampling& sampling, std::size_t count,
                               std::vector<TopLogprob>& top) {
  const std::size_t size = columns_.size();
  const bool filtered = sampling.temperature > 0.0 && filtering(sampling);
  if (!filtered && processed_acts_) collect(processed_.data(), sampling, {});
  if (!filtered && !processed_acts_) collect(logits, sampling, {});
  // Of the scores that were drawn from: all of them, or what the filters kept.
  const double temperature = sampling.temperature > 0.0 ? sampling.temperature : 1.0;
  const double highest = scores_.largest();
  double drawn = 0.0;
  for (const double value : scores_.values) drawn += std::exp(scaled(value, highest, temperature));
  const auto column = static_cast<std::size_t>(columns_.find(token_id));
  const double score = processed_acts_ ? processed_[column] : static_cast<double>(logits[column]);
  Likelihood found;
  found.processed_logprob = scaled(score, highest, temperature) - std::log(drawn);

  const double best = static_cast<double>(largest(logits, size));
  double total = 0.0;
  for (std::size_t n = 0; n < size; ++n) total += std::exp(logits[n] - best);
  const double shift = std::log(total);
  auto logprob = [&](std::size_t n) { return (logits[n] - best) - shift; };
  found.logprob = logprob(column);

  count = std::min(count, size);
  best_.resize(size);
  std::iota(best_.begin(), best_.end(), std::size_t{0});
  std::partial_sort(best_.begin(), best_.begin() + static_cast<std::ptrdiff_t>(count), best_.end(),
                    [&](std::size_t a, std::size_t b) {
                      return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
                    });
  for (std::size_t n = 0; n < count; ++n) {
    top.push_back({columns_.id(best_[n]), logprob(best_[n])});
  }
  return found;
}

}  // namespace headport::internal
