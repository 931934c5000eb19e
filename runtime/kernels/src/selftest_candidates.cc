// The self-test of RankedCandidates: a small vocabulary, against every token's logit in float64.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "candidates.h"
#include "selftest.h"

namespace headport::kernels {
namespace {

constexpr std::int64_t kV = 8 * 40 + 5;  // neither it nor the gaps between candidates fill registers
constexpr std::int64_t kH = 21;
constexpr std::int64_t kCount = 6;
constexpr std::int64_t kTwin = 9;  // a token whose row is that of token 3
constexpr Terms kTerms{0.5, 30.0, 1e-9, 1e-12};

struct Head {
  std::vector<float> x, weight, bias, logits, upper, noise;
  std::vector<std::int64_t> firsts;
  std::vector<double> z;  // exact logits

  explicit Head(float margin, bool with_noise) {
    std::uint32_t state = 5;
    const auto real = [&state] {
      state = state * 1664525U + 1013904223U;
      return static_cast<float>(state >> 8) / 8388608.0F - 1.0F;
    };
    const auto fill = [&real](std::vector<float>& values, std::int64_t count) {
      values.resize(static_cast<std::size_t>(count));
      std::generate(values.begin(), values.end(), real);
    };
    fill(x, kH);
    fill(weight, kV * kH);
    fill(bias, kV);
    fill(noise, with_noise ? kV : 1);
    for (float& each : noise) each *= with_noise ? 4.0F : 0.0F;
    std::copy_n(weight.begin() + 3 * kH, kH, weight.begin() + kTwin * kH);
    bias[kTwin] = bias[3] = 18;
    // The best lie side by side, and at the very end.
    bias[61] = 17;
    bias[60] = bias[kV - 1] = 16;
    firsts.resize(static_cast<std::size_t>(kV));
    std::iota(firsts.begin(), firsts.end(), 0);
    firsts[kTwin] = 3;
    for (std::int64_t v = 0; v < kV; ++v) {
      double sum = bias[static_cast<std::size_t>(v)];
      for (std::int64_t i = 0; i < kH; ++i)
        sum += double{weight[static_cast<std::size_t>(v * kH + i)]} * x[static_cast<std::size_t>(i)];
      z.push_back(std::tanh(kTerms.scale * sum / kTerms.softcap) * kTerms.softcap);
      logits.push_back(static_cast<float>(z.back()) + 0.5F * margin * real());
      upper.push_back(logits.back() + margin);
    }
    logits[60] += 200;  // of a candidate the exact logit alone counts
  }

  float key(std::int64_t v) const {
    const auto at = static_cast<std::size_t>(v);
    return upper[at] + noise[noise.size() == 1 ? 0 : at];
  }
};

// What is wrong with one row; null where nothing is.
const char* find_fault(const Kernel& kernel, const Head& head) {
  std::vector<std::int64_t> ids(kCount), order(static_cast<std::size_t>(kV));
  std::vector<double> found(kCount);
  double logsumexp = 0, cut = 0, error = 0;
  std::int64_t proved = 0;
  Candidates row{kV, kH, kCount, true, kTerms, head.x.data(),
                 {head.upper.data(), head.noise.data(), head.noise.size() == 1 ? 0 : 1},
                 head.logits.data(), head.weight.data(), head.bias.data(), head.firsts.data(),
                 ids.data(), found.data(), &logsumexp, &proved, &cut, &error};
  row.run(kernel);

  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&head](std::int64_t a, std::int64_t b) {
    return head.key(a) > head.key(b) || (head.key(a) == head.key(b) && a < b);
  });
  if (cut != double{head.key(order[kCount])}) return "the cut";
  const auto z_of = [&head](std::int64_t v) { return head.z[static_cast<std::size_t>(v)]; };
  std::sort(order.begin(), order.begin() + kCount, [&z_of](std::int64_t a, std::int64_t b) {
    return z_of(a) > z_of(b) || (z_of(a) == z_of(b) && a < b);
  });
  std::int64_t expected = 0;
  double mass = 0;
  for (std::int64_t v = 0; v < kV; ++v)
    if (std::find(ids.begin(), ids.end(), v) == ids.end())
      mass += std::exp(double{head.logits[static_cast<std::size_t>(v)]});
  for (std::size_t i = 0; i < kCount; ++i) {
    const std::int64_t id = order[i];
    if (ids[i] != id) return "the candidates";
    if (!(std::fabs(found[i] - z_of(id)) <= 1e-12)) return "their logits";
    mass += std::exp(z_of(id));
    if (expected == static_cast<std::int64_t>(i) && z_of(id) - error > cut) ++expected;
  }
  if (!(std::fabs(logsumexp - std::log(mass)) <= 2e-6)) return "the sum of all";
  if (proved != expected) return "how many are proved";
  return nullptr;
}

}  // namespace

std::string find_candidates_fault(const Kernel& kernel) {
  for (const float margin : {1e-4F, 0.02F, 0.5F})
    for (const bool with_noise : {false, true})
      if (const char* what = find_fault(kernel, Head(margin, with_noise)); what != nullptr)
        return std::string(kernel.name) + ": of candidates, " + what + " differs from float64";
  return {};
}

}  // namespace headport::kernels
