#include "sampling/candidates.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "sampling/filters.h"
#include "sampling/scores.h"

namespace headport::internal {
namespace {

constexpr double kRounding = 0x1p-40;     // relative, of a few float64 operations, exponentials too
constexpr double kKeyRounding = 0x1p-23;  // relative, of the head's float32 sum of bound and noise
constexpr float kBoundSlack = 1e-4f;      // far above the float32 logarithm's error
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Upper bound of g. With y = 1 - u: -ln u ≥ y + y²/2 + y³/3 + y⁴/4.
float gumbel_bound(std::uint32_t bits) {
  const float y = (static_cast<float>(~bits) + 0.5f) * 0x1p-32f;
  float series = y * 0.25f;
  for (const float term : {1.0f / 3.0f, 0.5f, 1.0f}) series = (series + term) * y;
  return kBoundSlack - std::log(series);
}

double scaled_at(const CandidateRow& row, std::size_t n, double temperature) {
  return scaled(row.logits[n], row.logits[0], temperature);
}

// Logits' own error in score units, and that of the few operations made with them.
double slack_of(const CandidateRow& row, double temperature) {
  double size = 0.0;
  for (const double logit : row.logits) size = std::max(size, std::abs(logit));
  return 4.0 * row.error / temperature + (size / temperature + 32.0) * kRounding;
}

// Least (side -1) or greatest (1) mass of all tokens before each rank, [C + 1]. The first token's
// mass is 1; of the others each difference of two logits may be off.
void masses_above(const CandidateRow& row, double temperature, double side,
                  std::vector<double>& found) {
  found.assign(1, 0.0);
  double sum = 0.0;
  for (std::size_t n = 0; n < row.size(); ++n) {
    const double doubt = side * 2.0 * row.error / temperature;
    sum += n == 0 ? 1.0 : std::exp(scaled_at(row, n, temperature) + doubt);
    found.push_back(sum);
  }
}

// How many leading candidates have a scaled logit from `least` up.
std::size_t count_from(const CandidateRow& row, double temperature, double least) {
  std::size_t count = 0;
  while (count < row.size() && scaled_at(row, count, temperature) >= least) ++count;
  return count;
}

std::size_t rank_of(const std::vector<double>& ascending, double value) {
  const auto place = std::lower_bound(ascending.begin(), ascending.end(), value);
  return std::max<std::size_t>(1, static_cast<std::size_t>(place - ascending.begin()));
}

}  // namespace

bool wants_noise(const Sampling& sampling) {
  return sampling.temperature > 0.0 && !filtering(sampling);
}

bool needs_all(const Sampling& sampling) {
  if (sampling.process_scores) return true;
  const bool by_mass = sampling.typical_p < 1.0 || sampling.epsilon_cutoff > 0.0 ||
                       sampling.eta_cutoff > 0.0;
  return sampling.temperature > 0.0 && by_mass;
}

void noise_row(const Columns& columns, std::size_t width, double temperature, const NoiseKey& key,
               float* noise) {
  const auto factor = static_cast<float>(temperature);
  DrawBits bits(key);
  for (std::size_t column = 0; column < columns.size(); ++column) {
    const float bound = gumbel_bound(bits.of(columns.id(column))) * factor;
    // Two roundings, of T and of the product, each at most 2^-24 of it.
    noise[column] = bound + std::abs(bound) * 0x1p-22f;
  }
  std::fill(noise + columns.size(), noise + width, -std::numeric_limits<float>::infinity());
}

std::optional<std::int64_t> Decider::decide(const CandidateRow& row, const Sampling& sampling,
                                            const NoiseKey& key, const TailMass& tail_mass) {
  if (row.proved == 0) return std::nullopt;
  if (sampling.temperature == 0.0) {
    std::size_t ties = 1;
    while (ties < row.size() && row.logits[ties] == row.logits[0]) ++ties;
    if (ties > row.proved) return std::nullopt;
    // Equal and proved: equal rows of the weight, of which the lowest original id wins.
    return *std::min_element(row.ids.begin(), row.ids.begin() + static_cast<std::ptrdiff_t>(ties));
  }
  if (sampling.top_k > 0) return within_top_k(row, sampling, key);
  if (sampling.top_p < 1.0) return within_top_p(row, sampling, key, tail_mass);
  return within_min_p(row, sampling, key);
}

// Once the k best and their ties are proved, no other token plays a part.
std::optional<std::int64_t> Decider::within_top_k(const CandidateRow& row, const Sampling& sampling,
                                                  const NoiseKey& key) {
  auto k = static_cast<std::size_t>(sampling.top_k);
  if (row.size() < k) {
    if (row.cut > -kInfinity) return std::nullopt;
    k = row.size();  // there are no others
  }
  std::size_t count = k;
  while (count < row.size() && row.logits[count] >= row.logits[k - 1]) ++count;
  if (count > row.proved) return std::nullopt;
  const auto end = static_cast<std::ptrdiff_t>(count);
  kept_.ids.assign(row.ids.begin(), row.ids.begin() + end);
  kept_.logits.assign(row.logits.begin(), row.logits.begin() + end);
  kept_.proved = count;
  kept_.cut = -kInfinity;
  kept_.error = row.error;
  if (sampling.top_p < 1.0) {
    return within_top_p(kept_, sampling, key, [](double) { return std::pair(0.0, 0.0); });
  }
  if (sampling.min_p > 0.0) return within_min_p(kept_, sampling, key);
  const auto winner = best(kept_, count, sampling.temperature, key);
  return winner ? std::optional(kept_.ids[*winner]) : std::nullopt;
}

// The kept set grows with the total mass: what wins in the largest and is in the smallest.
std::optional<std::int64_t> Decider::within_top_p(const CandidateRow& row, const Sampling& sampling,
                                                  const NoiseKey& key, const TailMass& tail_mass) {
  const double temperature = sampling.temperature, p = sampling.top_p;
  masses_above(row, temperature, -1.0, least_);
  masses_above(row, temperature, 1.0, greatest_);
  const auto [tail_low, tail_high] = tail_mass(temperature);
  const double doubt = std::exp(row.error / temperature);
  const double low = p * (least_.back() + tail_low / doubt) * (1.0 - kRounding);
  const double high = p * (greatest_.back() + tail_high * doubt) * (1.0 + kRounding);
  // A rank stays if the mass before it is below p of the total; the first always does. NaN, of
  // masses beyond float64, decides nothing.
  if (!(least_[row.proved] >= high)) return std::nullopt;
  std::size_t fewest = rank_of(greatest_, low), most = rank_of(least_, high);
  if (sampling.min_p > 0.0) {
    const double limit = std::log(sampling.min_p), slack = slack_of(row, temperature);
    fewest = std::min(fewest, std::max<std::size_t>(1, count_from(row, temperature, limit + slack)));
    most = std::min(most, std::max<std::size_t>(1, count_from(row, temperature, limit - slack)));
  }
  const auto winner = best(row, most, temperature, key);
  return winner && *winner < fewest ? std::optional(row.ids[*winner]) : std::nullopt;
}

// Where the cut is below the threshold, every kept token is a candidate.
std::optional<std::int64_t> Decider::within_min_p(const CandidateRow& row, const Sampling& sampling,
                                                  const NoiseKey& key) {
  const double temperature = sampling.temperature, slack = slack_of(row, temperature);
  const double limit = sampling.min_p > 0.0 ? std::log(sampling.min_p) : -kInfinity;
  if (!(scaled(row.cut, row.logits[0], temperature) < limit - slack)) return std::nullopt;
  for (std::size_t n = 1; n < row.size(); ++n) {
    if (std::abs(scaled_at(row, n, temperature) - limit) <= slack) return std::nullopt;
  }
  const std::size_t kept = std::max<std::size_t>(1, count_from(row, temperature, limit));
  const auto winner = best(row, kept, temperature, key);
  return winner ? std::optional(row.ids[*winner]) : std::nullopt;
}

std::optional<std::int64_t> Decider::decide_noisy(const CandidateRow& row, const Sampling& sampling,
                                                  const NoiseKey& key,
                                                  std::optional<double> largest) {
  const double temperature = sampling.temperature;
  const auto winner = best(row, row.size(), temperature, key);
  if (!winner) return std::nullopt;
  const double score = scores_[*winner], slack = slack_of(row, temperature);
  const double cut =
      std::isfinite(row.cut) ? row.cut + std::abs(row.cut) * kKeyRounding : row.cut;
  if (!(score > scaled(cut, row.logits[0], temperature) + slack)) return std::nullopt;
  if (sampling.min_p > 0.0) {
    if (!largest) return std::nullopt;
    const double distance = scaled(row.logits[*winner], *largest, temperature);
    if (!(distance >= std::log(sampling.min_p) + slack)) return std::nullopt;
  }
  return row.ids[*winner];
}

// The place of the best score among the first candidates, nothing where two are too close to tell.
std::optional<std::size_t> Decider::best(const CandidateRow& row, std::size_t count,
                                         double temperature, const NoiseKey& key) {
  scores_.clear();
  for (std::size_t n = 0; n < count; ++n) {
    scores_.push_back(scaled_at(row, n, temperature) + gumbel(draw_bits(key, row.ids[n])));
  }
  const auto winner = std::max_element(scores_.begin(), scores_.end());
  double second = -kInfinity;
  for (auto each = scores_.begin(); each != scores_.end(); ++each) {
    if (each != winner) second = std::max(second, *each);
  }
  if (!(*winner - second > slack_of(row, temperature))) return std::nullopt;
  return static_cast<std::size_t>(winner - scores_.begin());
}

}  // namespace headport::internal
