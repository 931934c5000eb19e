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
  sampler.choose(logits.data(), sampling, {1, 2, 0}, {});
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
  }
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
  return headport::test::result();
}
