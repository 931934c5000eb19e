#include "generator/candidate_chooser.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

#include "error.h"
#include "sampling/filters.h"
#include "sampling/scores.h"

namespace headport::internal {

void CandidateChooser::reserve(std::size_t rows) {
  if (asked_.size() < rows) asked_.resize(rows);
  for (Group* each : {&plain_, &steered_, &noisy_, &again_, &rest_, &rows_}) each->reserve(rows);
  noise_.resize(std::max(noise_.size(), rows * head_.width()));
  outside_.resize(columns_.size());
}

void CandidateChooser::choose(std::vector<Draw>& draws) {
  reserve(draws.size());
  ask(draws);
  if (head_.certified()) decide();
  rest_.clear();
  for (std::size_t n = 0; n < count_; ++n) {
    Draw& draw = *asked_[n].draw;
    if (draw.token >= 0) stats_.count(*draw.sampling, Decided::kCertified);
    if (draw.token < 0 || draw.logprobs >= 0) rest_.push_back(n);
  }
  from_all(rest_);
}

const float* CandidateChooser::logits(std::size_t count) {
  rows_.clear();
  for (std::size_t row = 0; row < count; ++row) rows_.push_back(row);
  return exact_ ? head_.full(rows_) : head_.rescored(rows_);
}

// Asks the callbacks, each once.
void CandidateChooser::ask(std::vector<Draw>& draws) {
  count_ = draws.size();
  for (std::size_t n = 0; n < count_; ++n) {
    Asked& asked = asked_[n];
    asked.draw = &draws[n];
    asked.largest.reset();
    asked.allowed = ask_allowed(*draws[n].sampling, draws[n].context);
    if (asked.allowed.all || !draws[n].sampling->allowed) continue;
    asked.allowed_ids.assign(asked.allowed.ids.begin(), asked.allowed.ids.end());
    asked.allowed.ids = asked.allowed_ids;
  }
}

void CandidateChooser::decide() {
  for (Group* each : {&plain_, &steered_, &noisy_, &again_}) each->clear();
  for (std::size_t n = 0; n < count_; ++n) {
    Asked& asked = asked_[n];
    const Sampling& sampling = *asked.draw->sampling;
    if (needs_all(sampling)) continue;
    const Context& context = asked.draw->context;
    if (!plan_row(sampler_, columns_, sampling, asked.allowed, context, asked.plan)) continue;
    if (wants_noise(sampling)) {
      noisy_.push_back(n);
    } else {
      (asked.plan.acts ? steered_ : plain_).push_back(n);
    }
  }
  by_noise(noisy_);
  by_bound(plain_, false);
  by_bound(steered_, true);
  by_noise(again_);
}

Candidates CandidateChooser::pick(const Group& group, bool noisy) {
  rows_.clear();
  for (const std::size_t n : group) rows_.push_back(asked_[n].draw->row);
  return head_.pick(rows_, noisy ? noise_.data() : nullptr);
}

void CandidateChooser::by_bound(const Group& group, bool steered) {
  if (group.empty()) return;
  const std::size_t width = head_.width();
  for (std::size_t place = 0; steered && place < group.size(); ++place) {
    float* noise = noise_.data() + place * width;
    std::fill(noise, noise + columns_.size(), 0.0f);
    std::fill(noise + columns_.size(), noise + width, -std::numeric_limits<float>::infinity());
    steer(asked_[group[place]].plan, noise);
  }
  const Candidates found = pick(group, steered);
  for (std::size_t place = 0; place < group.size(); ++place) {
    Asked& asked = asked_[group[place]];
    if (!read(found, place, asked)) continue;
    const Sampling& sampling = *asked.draw->sampling;
    const TailMass masses = [&](double temperature) { return tail_mass(asked, temperature); };
    const auto token = decider_.decide(row_, sampling, asked.draw->key, masses);
    if (token) {
      asked.draw->token = *token;
      continue;
    }
    const char* first = sampling.temperature > 0.0 ? first_filter(sampling) : nullptr;
    if (first == nullptr || std::string_view(first) != "min_p" || row_.proved == 0) continue;
    asked.largest = row_.logits[0];
    again_.push_back(group[place]);
  }
}

void CandidateChooser::by_noise(const Group& group) {
  if (group.empty()) return;
  for (std::size_t place = 0; place < group.size(); ++place) {
    const Asked& asked = asked_[group[place]];
    float* noise = noise_.data() + place * head_.width();
    noise_row(columns_, head_.width(), asked.draw->sampling->temperature, asked.draw->key, noise);
    if (asked.plan.acts) steer(asked.plan, noise);
  }
  const Candidates found = pick(group, true);
  for (std::size_t place = 0; place < group.size(); ++place) {
    Asked& asked = asked_[group[place]];
    if (!read(found, place, asked)) continue;
    const auto token =
        decider_.decide_noisy(row_, *asked.draw->sampling, asked.draw->key, asked.largest);
    if (token) asked.draw->token = *token;
  }
}

bool CandidateChooser::read(const Candidates& found, std::size_t place, const Asked& asked) {
  const std::size_t first = place * found.count;
  row_.clear();
  row_.proved = 0;
  row_.cut = found.cut[place];
  row_.error = found.error[place];
  for (std::size_t n = 0; n < found.count; ++n) {
    const double logit = found.logits[first + n];
    if (!std::isfinite(logit)) {
      throw Error(HEADPORT_NON_FINITE_ERROR,
                  text("prompt ", asked.draw->context.index, ", step ",
                       asked.draw->context.tokens.size, ": a candidate's logit is ", logit,
                       "; the bundle or its input is broken, `headport inspect BUNDLE --selftest` "
                       "tells which"));
    }
    const auto column = static_cast<std::size_t>(found.columns[first + n]);
    if (column >= columns_.size()) continue;  // a padded column is no token
    row_.ids.push_back(columns_.id(column));
    row_.logits.push_back(logit);
    if (static_cast<std::int64_t>(n) < found.proved[place]) ++row_.proved;
  }
  if (row_.size() == 0) return false;
  if (!asked.plan.acts) return true;
  return processor_.process(asked.plan, *asked.draw->sampling, asked.draw->context, row_);
}

// Bounds of Σ exp((z - z₁) / T) over all tokens that are no candidates of `row_`.
std::pair<double, double> CandidateChooser::tail_mass(const Asked& asked, double temperature) {
  const QuantisedLogits found = head_.quantised(asked.draw->row);
  std::fill(outside_.begin(), outside_.end(), std::uint8_t{1});
  for (const std::int64_t id : row_.ids) outside_[static_cast<std::size_t>(columns_.find(id))] = 0;
  const double largest = row_.logits[0];
  double low = 0.0, high = 0.0;
  for (std::size_t column = 0; column < outside_.size(); ++column) {
    if (outside_[column] == 0 || (asked.plan.acts && asked.plan.alive[column] == 0)) continue;
    const double upper = static_cast<double>(found.upper_bounds[column]);
    const double logit = static_cast<double>(found.logits[column]);
    high += std::exp(scaled(upper, largest, temperature));
    const double slack = 0x1p-22 * (std::abs(logit) + std::abs(upper));
    low += std::exp(scaled(2.0 * logit - upper - slack, largest, temperature));
  }
  // A softcap's slope falls, so that the bound below is not the one above; a processor may lower
  // any token.
  return {head_.has_softcap() || asked.plan.acts ? 0.0 : low, high};
}

void CandidateChooser::from_all(const Group& group) {
  if (group.empty()) return;
  rows_.clear();
  for (const std::size_t n : group) rows_.push_back(asked_[n].draw->row);
  const float* all = exact_ ? head_.full(rows_) : head_.rescored(rows_);
  for (std::size_t place = 0; place < group.size(); ++place) {
    Asked& asked = asked_[group[place]];
    if (asked.draw->token < 0) {
      stats_.count(*asked.draw->sampling, exact_ ? Decided::kFallback : Decided::kUnproved);
    }
    choose_from(sampler_, all + place * head_.width(), *asked.draw, asked.allowed);
  }
}

}  // namespace headport::internal
