#include "sampling/processed_candidates.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "sampling/processors.h"

namespace headport::internal {
namespace {

constexpr float kAlways = 1e35f;       // above any bound of a logit with noise, up to 1e30 · 23
constexpr double kRounding = 0x1p-40;  // relative, of the few float64 operations of processors

}  // namespace

bool plan_row(Sampler& sampler, const Columns& columns, const Sampling& sampling,
              const AllowedAnswer& allowed, const Context& context, Plan& plan) {
  plan.acts = processing(sampling);
  if (!plan.acts) return true;
  const Sampler::Processed found = sampler.process_nothing(sampling, allowed, context);
  // What is allowed was banned before: its scores are no longer the model's.
  if (found.overruled) return false;
  plan.alive.resize(columns.size());
  bool any = false;
  for (std::size_t column = 0; column < columns.size(); ++column) {
    plan.alive[column] = found.scores[column] > kBanned ? 1 : 0;
    any = any || plan.alive[column] != 0;
  }
  plan.lifted.clear();
  lift(sampling, context, [&](std::int64_t id) {
    const std::int64_t column = columns.find(id);
    if (column < 0 || plan.alive[static_cast<std::size_t>(column)] == 0) return;
    plan.lifted.push_back(static_cast<std::size_t>(column));
  });
  std::sort(plan.lifted.begin(), plan.lifted.end());
  plan.lifted.erase(std::unique(plan.lifted.begin(), plan.lifted.end()), plan.lifted.end());
  return any;
}

void steer(const Plan& plan, float* noise) {
  for (std::size_t column = 0; column < plan.alive.size(); ++column) {
    if (plan.alive[column] == 0) noise[column] = -std::numeric_limits<float>::infinity();
  }
  for (const std::size_t column : plan.lifted) noise[column] = kAlways;
}

bool CandidateProcessor::process(const Plan& plan, const Sampling& sampling, const Context& context,
                                 CandidateRow& row) {
  const std::size_t size = row.size();
  order_.resize(size);
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  std::sort(order_.begin(), order_.end(),
            [&](std::size_t a, std::size_t b) { return row.ids[a] < row.ids[b]; });
  ids_.clear();
  scores_.clear();
  for (const std::size_t n : order_) {
    ids_.push_back(row.ids[n]);
    scores_.push_back(row.logits[n]);
  }
  const Columns own(ids_);
  tally_.resize(size);
  mask_.resize(size);
  // What is allowed is among the bans of the plan.
  Row rules{scores_.data(), own, sampling, context, AllowedAnswer{}, tally_, sums_, mask_,
            identities_};
  apply_processors(rules);
  order_.clear();
  for (std::size_t n = 0; n < size; ++n) {
    const auto column = static_cast<std::size_t>(columns_.find(ids_[n]));
    if (plan.alive[column] != 0 && scores_[n] > kBanned) order_.push_back(n);
  }
  if (order_.empty()) return false;
  std::sort(order_.begin(), order_.end(), [&](std::size_t a, std::size_t b) {
    return scores_[a] != scores_[b] ? scores_[a] > scores_[b] : a < b;
  });
  row.clear();
  double largest = 0.0;
  for (const std::size_t n : order_) {
    row.ids.push_back(ids_[n]);
    row.logits.push_back(scores_[n]);
    largest = std::max(largest, std::abs(scores_[n]));
  }
  const double p = sampling.repetition_penalty;
  row.error *= std::max({1.0, p, 1.0 / p});
  const double slack = 4.0 * row.error + (largest + 32.0) * kRounding;
  // Leading candidates above `cut` and apart from the next by more than the errors.
  row.proved = 0;
  for (std::size_t n = 0; n < row.size(); ++n) {
    const bool above = row.logits[n] - slack > row.cut;
    const bool apart = n + 1 == row.size() || row.logits[n] - row.logits[n + 1] > slack;
    if (!above || !apart) break;
    ++row.proved;
  }
  return true;
}

}  // namespace headport::internal
