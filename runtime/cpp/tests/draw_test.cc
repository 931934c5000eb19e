// Short cuts change nothing: draws and filters of whole rows against the plain rule.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "sampling/draw.h"
#include "sampling/filters.h"
#include "sampling/sampler.h"

namespace headport::internal {
namespace {

constexpr double kTemperatures[] = {1e-5, 0.3, 1.0, 5.0, 1e5};

std::vector<float> row(std::mt19937& random, std::size_t size, float spread, bool ties) {
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> found(size);
  for (float& each : found) each = normal(random) * spread;
  if (ties) {
    for (float& each : found) each = std::round(each);
  }
  return found;
}

std::size_t plain_draw(const std::vector<float>& logits, double temperature, const NoiseKey& key) {
  const double top = *std::max_element(logits.begin(), logits.end());
  std::size_t best = 0;
  double best_sum = -INFINITY;
  for (std::size_t n = 0; n < logits.size(); ++n) {
    const double sum = (logits[n] - top) / temperature +
                       gumbel(draw_bits(key, static_cast<std::int64_t>(n)));
    if (sum <= best_sum) continue;
    best_sum = sum;
    best = n;
  }
  return best;
}

void check_draws(const std::vector<float>& logits, const NoiseKey& key) {
  std::vector<double> scores(logits.begin(), logits.end());
  std::vector<std::int64_t> ids;
  for (std::size_t n = 0; n < logits.size(); ++n) ids.push_back(static_cast<std::int64_t>(n));
  for (const double temperature : kTemperatures) {
    const std::size_t wanted = plain_draw(logits, temperature, key);
    CHECK(draw_from_row(logits.data(), logits.size(), temperature, key) == wanted);
    CHECK(draw_from(scores.data(), ids.data(), ids.size(), temperature, key) == wanted);
  }
}

void check_kept(const std::vector<float>& logits, const Sampling& sampling) {
  Scores plain;
  plain.reserve(logits.size());
  for (std::size_t n = 0; n < logits.size(); ++n) {
    plain.add(logits[n], static_cast<std::int64_t>(n));
  }
  keep(plain, sampling);
  const Columns columns(logits.size());
  Sampler sampler(columns);
  sampler.choose(logits.data(), sampling, {}, {1, 2, 0}, {});
  CHECK(sampler.kept().ids == plain.ids);
}

void check_filters(const std::vector<float>& logits) {
  for (const double temperature : kTemperatures) {
    Sampling sampling;
    sampling.temperature = temperature;
    sampling.min_p = 0.05;
    check_kept(logits, sampling);
    sampling.top_k = 7;
    check_kept(logits, sampling);
    sampling.min_p = 0.0;
    check_kept(logits, sampling);
    sampling.top_p = 0.8;
    check_kept(logits, sampling);
    // Top-p alone has a way of its own.
    sampling.top_k = 0;
    for (const double p : {0.0, 1e-8, 0.01, 0.5, 0.8, 0.9, 0.99, 0.9999, 1.0 - 1e-12}) {
      sampling.top_p = p;
      check_kept(logits, sampling);
      sampling.min_p = 0.02;
      check_kept(logits, sampling);
      sampling.min_p = 0.0;
    }
  }
}

}  // namespace
}  // namespace headport::internal

namespace headport::internal {
namespace {

// Top-p of processed scores: banned ones have no mass, and pruned ids are left out.
void check_processed_top_p(std::mt19937& random) {
  const auto logits = row(random, 3000, 4.0f, false);
  std::vector<std::int64_t> ids;
  for (std::size_t n = 0; n < logits.size(); ++n) ids.push_back(static_cast<std::int64_t>(3 * n));
  const Columns columns(ids);
  Sampling sampling;
  sampling.temperature = 0.9;
  sampling.top_p = 0.95;
  sampling.suppress_tokens = {0, 3, 33, 300, 3000};
  sampling.logit_bias = {{{9}, 5.0}};
  Scores plain;
  for (std::size_t n = 0; n < logits.size(); ++n) {
    const std::int64_t id = ids[n];
    const auto& bans = sampling.suppress_tokens;
    if (std::find(bans.begin(), bans.end(), id) != bans.end()) continue;
    plain.add(static_cast<double>(logits[n]) + (id == 9 ? 5.0 : 0.0), id);
  }
  keep(plain, sampling);
  Sampler sampler(columns);
  sampler.choose(logits.data(), sampling, {}, {1, 2, 0}, {});
  CHECK(sampler.kept().ids == plain.ids);
  CHECK(sampler.sorted_rows() == 0);
}

// Rows as models give them are never sorted; equal scores at the border are told by id.
void check_short_cut(std::mt19937& random) {
  std::vector<float> logits = row(random, 49152, 3.0f, false);
  const Columns columns(logits.size());
  Sampler sampler(columns);
  Sampling sampling;
  sampling.temperature = 1.0;
  for (std::uint64_t step = 0; step < 20; ++step) {
    sampling.top_p = 0.8 + 0.01 * static_cast<double>(step);
    sampler.choose(logits.data(), sampling, {}, {1, step, 0}, {});
  }
  CHECK(sampler.sorted_rows() == 0);
  std::vector<float> ties(1000, 1.0f);
  sampling.top_p = 0.5;
  check_kept(ties, sampling);
}

}  // namespace
}  // namespace headport::internal

int main() {
  using namespace headport::internal;
  std::mt19937 random(1);
  for (const float spread : {0.0f, 0.1f, 1.0f, 3.0f, 30.0f}) {
    for (const std::size_t size : {1u, 7u, 8u, 29u, 1000u, 4099u}) {
      for (std::uint64_t n = 0; n < 10; ++n) {
        const auto logits = row(random, size, spread, n % 3 == 0);
        check_draws(logits, {random(), n, n % 2});
        if (n < 2) check_filters(logits);
      }
    }
  }
  check_processed_top_p(random);
  check_short_cut(random);
  return headport::test::result();
}
