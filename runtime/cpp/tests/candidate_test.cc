// Candidates of a head that is a table: what they decide is what all logits give, what they do not
// decide is counted, and choosing takes no memory.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "allocations.h"
#include "check.h"
#include "generator/candidate_chooser.h"

namespace headport::internal {
namespace {

constexpr std::size_t kSize = 600, kWidth = 605, kRows = 3;

// How many candidates a head gives, and how far its quantised logits may be off.
struct Form {
  std::size_t best;
  float rounding;
  bool certified;
};

constexpr Form kGood = {40, 0.02f, true};
constexpr Form kPoor = {3, 1.5f, true};  // of which many a row is not decided
constexpr Form kUnproved = {40, 0.02f, false};

std::vector<std::int64_t> kept_ids() {
  std::vector<std::int64_t> ids;
  for (std::size_t n = 0; n < kSize; ++n) ids.push_back(static_cast<std::int64_t>(2 * n + n / 7));
  return ids;
}

// Rows of logits; the last columns are padding that would win.
class TableHead final : public CandidateHead {
 public:
  TableHead(std::mt19937& random, const Form& form)
      : certified_(form.certified), best_(form.best) {
    std::normal_distribution<float> normal(0.0f, 3.0f);
    std::uniform_real_distribution<float> wrong(-form.rounding, form.rounding);
    for (std::size_t n = 0; n < kRows * kWidth; ++n) {
      exact_.push_back(n % kWidth < kSize ? normal(random) : 50.0f);
      quantised_.push_back(exact_.back() + wrong(random));
      upper_.push_back(quantised_.back() + form.rounding);
    }
    order_.resize(kWidth);
    for (auto* each : {&logits_, &keys_}) each->resize(kRows * kWidth);
    columns_.resize(kRows * best_);
    values_.resize(kRows * best_);
    proved_.resize(kRows);
    for (auto* each : {&cut_, &error_}) each->resize(kRows);
  }

  bool certified() const override { return certified_; }
  bool has_softcap() const override { return false; }
  std::size_t width() const override { return kWidth; }
  QuantisedLogits quantised(std::size_t row) override {
    return {quantised_.data() + row * kWidth, upper_.data() + row * kWidth};
  }
  const float* full(RowSpan rows) override { return copied(rows, exact_); }
  const float* rescored(RowSpan rows) override { return copied(rows, quantised_); }
  const std::vector<float>& exact() const { return exact_; }

  Candidates pick(RowSpan rows, const float* noise) override {
    for (std::size_t n = 0; n < rows.size; ++n) {
      const float* upper = upper_.data() + rows[n] * kWidth;
      const float* own = exact_.data() + rows[n] * kWidth;
      for (std::size_t v = 0; v < kWidth; ++v) {
        keys_[v] = upper[v] + (noise != nullptr ? noise[n * kWidth + v] : 0.0f);
      }
      std::iota(order_.begin(), order_.end(), std::size_t{0});
      const auto best = order_.begin() + static_cast<std::ptrdiff_t>(best_);
      std::partial_sort(order_.begin(), best + 1, order_.end(),
                        [&](std::size_t a, std::size_t b) { return keys_[a] > keys_[b]; });
      cut_[n] = static_cast<double>(keys_[*best]);
      std::sort(order_.begin(), best, [&](std::size_t a, std::size_t b) {
        return own[a] != own[b] ? own[a] > own[b] : a < b;
      });
      error_[n] = 1e-12;
      proved_[n] = 0;
      for (std::size_t rank = 0; rank < best_; ++rank) {
        columns_[n * best_ + rank] = static_cast<std::int64_t>(order_[rank]);
        values_[n * best_ + rank] = static_cast<double>(own[order_[rank]]);
        const bool above = static_cast<double>(own[order_[rank]]) > cut_[n];
        if (noise == nullptr && above && proved_[n] == static_cast<std::int64_t>(rank)) ++proved_[n];
      }
    }
    return {best_, columns_.data(), values_.data(), proved_.data(), cut_.data(), error_.data()};
  }

 private:
  const float* copied(RowSpan rows, const std::vector<float>& from) {
    for (std::size_t n = 0; n < rows.size; ++n) {
      std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(rows[n] * kWidth), kWidth,
                  logits_.begin() + static_cast<std::ptrdiff_t>(n * kWidth));
    }
    return logits_.data();
  }

  bool certified_;
  std::size_t best_;
  std::vector<float> exact_, quantised_, upper_, logits_, keys_;
  std::vector<std::size_t> order_;
  std::vector<std::int64_t> columns_, proved_;
  std::vector<double> values_, cut_, error_;
};

std::vector<Sampling> samplings() {
  std::vector<Sampling> found(1);
  const auto add = [&](auto change) {
    Sampling sampling;
    change(sampling);
    found.push_back(sampling);
  };
  for (const double temperature : {0.5, 1.0, 2.0}) {
    add([&](Sampling& s) { s.temperature = temperature; });
    add([&](Sampling& s) { s.temperature = temperature; s.top_k = 10; });
    add([&](Sampling& s) { s.temperature = temperature; s.top_k = 300; });
    add([&](Sampling& s) { s.temperature = temperature; s.top_p = 0.6; });
    add([&](Sampling& s) { s.temperature = temperature; s.min_p = 0.1; s.top_p = 0.7; });
    add([&](Sampling& s) { s.temperature = temperature; s.min_p = 0.05; });
    add([&](Sampling& s) { s.temperature = temperature; s.typical_p = 0.5; });
  }
  const std::size_t plain = found.size();
  for (std::size_t n = 0; n < plain; ++n) {
    Sampling rules = found[n];
    rules.repetition_penalty = n % 2 == 0 ? 1.3 : 0.8;
    rules.frequency_penalty = -0.5;
    rules.logit_bias = {{{4}, 3.0}, {{6}, -9.0}, {{5, 8}, 40.0}};
    rules.no_repeat_ngram_size = 2;
    rules.suppress_tokens = {10, 12};
    found.push_back(rules);
  }
  Sampling few;
  few.allowed_ids = {2, 4, 6, 9};
  found.push_back(few);
  return found;
}

struct Sums {
  std::int64_t certified = 0, fallbacks = 0, unproved = 0;
};

Sums sums_of(const Stats& stats) {
  Sums found;
  for (const auto& [_, each] : stats.modes()) {
    found.certified += each.certified;
    found.fallbacks += each.fallbacks;
    found.unproved += each.unproved;
  }
  return found;
}

void check_tokens(const Form& form, bool exact) {
  const bool certified = form.certified;
  std::mt19937 random(4);
  const std::vector<std::int64_t> ids = kept_ids();
  const Columns columns(ids);
  Sampler sampler(columns), plain(columns);
  Stats stats;
  const Ids prompt = {4, 6, 8}, tokens = {6, 21, 4};
  std::int64_t asked = 0;
  for (std::uint64_t round = 0; round < 40; ++round) {
    TableHead head(random, form);
    CandidateChooser chooser(head, columns, sampler, stats, exact);
    for (const Sampling& sampling : samplings()) {
      std::vector<Draw> draws(kRows);
      for (std::size_t row = 0; row < kRows; ++row) {
        draws[row].row = row;
        draws[row].sampling = &sampling;
        draws[row].key = {round, row, 1};
        draws[row].context = {prompt, tokens, {}};
      }
      chooser.choose(draws);
      asked += static_cast<std::int64_t>(kRows);
      if (!certified || !exact) continue;
      for (const Draw& draw : draws) {
        const float* logits = head.exact().data() + draw.row * kWidth;
        const std::int64_t wanted = plain.choose(logits, sampling,
                                                 ask_allowed(sampling, draw.context), draw.key,
                                                 draw.context);
        CHECK(draw.token == wanted);
      }
    }
  }
  const Sums found = sums_of(stats);
  CHECK(found.certified + found.fallbacks + found.unproved == asked);
  const std::int64_t least = form.best == kGood.best ? asked / 2 : asked / 20;
  CHECK(certified ? found.certified > least : found.certified == 0);
  CHECK(exact ? found.fallbacks > 0 && found.unproved == 0 : found.fallbacks == 0);
}

void check_no_allocation() {
  std::mt19937 random(5);
  const std::vector<std::int64_t> ids = kept_ids();
  const Columns columns(ids);
  Sampler sampler(columns);
  Stats stats;
  TableHead head(random, kGood);
  CandidateChooser chooser(head, columns, sampler, stats, true);
  const Ids prompt = {4, 6, 8};
  for (const Sampling& sampling : samplings()) {
    std::vector<Draw> draws(kRows);
    for (std::uint64_t step = 0; step < 4; ++step) {
      for (std::size_t row = 0; row < kRows; ++row) {
        draws[row] = {};
        draws[row].row = row;
        draws[row].sampling = &sampling;
        draws[row].key = {1, step, 0};
        draws[row].context = {prompt, {}, {}};
      }
      test::count_allocations(step > 1);
      chooser.choose(draws);
      test::count_allocations(false);
    }
  }
  CHECK_NAMED(test::allocations == 0, std::to_string(test::allocations));
}

void check_broken() {
  std::mt19937 random(6);
  const std::vector<std::int64_t> ids = kept_ids();
  const Columns columns(ids);
  CandidateRow row;
  row.ids = {2, 4};
  row.logits = {3.0, 1.0};
  row.cut = HUGE_VAL;  // nothing is known of the others
  row.error = HUGE_VAL;
  Sampling sampling;
  sampling.temperature = 1.0;
  Decider decider;
  CHECK(!decider.decide_noisy(row, sampling, {1, 2, 3}, std::nullopt));
  const TailMass none = [](double) { return std::pair(0.0, HUGE_VAL); };
  sampling.top_p = 0.5;
  row.proved = 2;
  CHECK(!decider.decide(row, sampling, {1, 2, 3}, none));
}

}  // namespace
}  // namespace headport::internal

int main() {
  using namespace headport::internal;
  check_tokens(kGood, true);
  check_tokens(kPoor, true);
  check_tokens(kGood, false);
  check_tokens(kUnproved, true);
  check_tokens(kUnproved, false);
  check_no_allocation();
  check_broken();
  return headport::test::result();
}
