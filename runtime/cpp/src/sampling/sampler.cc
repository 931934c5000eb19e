#include "sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "error.h"
#include "sampling/draw.h"
#include "sampling/filters.h"
#include "sampling/largest.h"
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

const std::vector<double>& Sampler::process(const float* logits, const Sampling& sampling,
                                            const Context& context) {
  std::copy(logits, logits + columns_.size(), processed_.begin());
  if (processing(sampling)) {
    Row row{processed_.data(), columns_, sampling, context, ask_allowed(sampling, context),
            tally_, sums_, mask_, identities_};
    apply_processors(row);
  }
  return processed_;
}

// Without processors a row is its logits. Where top-k comes first, only what it keeps is taken up.
void Sampler::collect_from(const float* logits, const Sampling& sampling) {
  const std::size_t size = columns_.size();
  const auto k = static_cast<std::size_t>(sampling.top_k);
  scores_.clear();
  const bool few = sampling.temperature > 0.0 && k > 0 && k < size;
  const float least =
      few ? static_cast<float>(kth_largest(logits, size, k, scores_.heap)) : 0.0f;
  for (std::size_t n = 0; n < size; ++n) {
    if (!few || logits[n] >= least) scores_.add(logits[n], columns_.id(n));
  }
}

void Sampler::collect_processed(const Context& context) {
  scores_.clear();
  for (std::size_t n = 0; n < processed_.size(); ++n) {
    if (processed_[n] > kBanned) scores_.add(processed_[n], columns_.id(n));
  }
  if (scores_.size() > 0) return;
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

std::int64_t Sampler::choose(const float* logits, const Sampling& sampling, const NoiseKey& key,
                             const Context& context) {
  refuse_not_finite(logits, context);
  const double temperature = sampling.temperature;
  processed_acts_ = processing(sampling);
  if (processed_acts_) {
    process(logits, sampling, context);
    collect_processed(context);
    if (temperature == 0.0) return scores_.ids[argmax(scores_.values.data(), scores_.size())];
  } else {
    if (temperature == 0.0) return columns_.id(argmax(logits, columns_.size()));
    const bool all = !filtering(sampling) && columns_.ids() == nullptr;
    if (all && temperature >= kColdest && temperature <= kHottest) {
      return columns_.id(draw_from_row(logits, columns_.size(), temperature, key));
    }
    collect_from(logits, sampling);
  }
  keep(scores_, sampling);
  return draw(sampling, key);
}

Likelihood Sampler::likelihood(std::int64_t token_id, const float* logits,
                               const Sampling& sampling, std::size_t count,
                               std::vector<TopLogprob>& top) {
  const std::size_t size = columns_.size();
  const bool filtered = sampling.temperature > 0.0 && filtering(sampling);
  if (!filtered && !processed_acts_) collect_from(logits, sampling);
  // Of the scores that were drawn from: all of them, or what the filters kept.
  const double temperature = sampling.temperature > 0.0 ? sampling.temperature : 1.0;
  log_softmax(scores_.values, scores_.largest(), temperature, scores_.log_p);
  const auto place = std::lower_bound(scores_.ids.begin(), scores_.ids.end(), token_id);
  Likelihood found;
  found.processed_logprob = scores_.log_p[static_cast<std::size_t>(place - scores_.ids.begin())];

  const double best = static_cast<double>(largest(logits, size));
  double total = 0.0;
  for (std::size_t n = 0; n < size; ++n) total += std::exp(logits[n] - best);
  const double shift = std::log(total);
  auto logprob = [&](std::size_t n) { return (logits[n] - best) - shift; };
  found.logprob = logprob(static_cast<std::size_t>(columns_.find(token_id)));

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
