// Norms and activations: the plain form and the fast one against float64.
#include <cmath>
#include <limits>
#include <vector>

#include "checks.h"
#include "product.h"

namespace {

using namespace headport::kernels;

void check_norms() {
  for (const Kernel* kernel : {&kPortable, &find_kernel()})
    for (const std::int64_t K : {4, 8, 30, 576})
      for (const bool skips : {false, true}) {
        const std::vector<float> from = random_values(3 * K);
        const float* x = from.data();
        const float* skip = x + K;
        const float* gamma = skip + K;
        std::vector<float> sum(static_cast<std::size_t>(K)), normed(sum.size());
        kernel->normalise({x, skips ? skip : nullptr, gamma, 1e-2F, K, sum.data(), normed.data()});
        double squares = 0;
        const auto added = [&](std::int64_t k) { return double{x[k]} + (skips ? double{skip[k]} : 0.0); };
        for (std::int64_t k = 0; k < K; ++k) squares += added(k) * added(k);
        const double factor = 1 / std::sqrt(squares / static_cast<double>(K) + double{1e-2F});
        for (std::int64_t k = 0; k < K; ++k) {
          const auto at = static_cast<std::size_t>(k);
          expect(std::fabs(double{sum[at]} - added(k)) < 1e-6, "a sum against float64");
          expect(std::fabs(double{normed[at]} - added(k) * factor * double{gamma[k]}) < 2e-6,
                 "a norm against float64");
        }
        // In place of the sum, and of a row that holds what is none.
        std::vector<float> alone(sum.size());
        kernel->normalise({x, skips ? skip : nullptr, gamma, 1e-2F, K, alone.data(), alone.data()});
        expect(alone == normed, "a norm that keeps no sum");
        alone.assign(x, x + K);
        alone[0] = std::numeric_limits<float>::quiet_NaN();
        kernel->normalise({alone.data(), nullptr, gamma, 1e-2F, K, sum.data(), normed.data()});
        for (const float value : normed) expect(std::isnan(value), "a norm of a row that is none");
      }
}

void check_activations() {
  for (const Kernel* kernel : {&kPortable, &find_kernel()})
    for (const bool silu : {true, false}) {
      std::vector<float> gate, up;
      for (int i = -4003; i <= 4000; ++i) gate.push_back(static_cast<float>(i) / 37), up.push_back(0.75F);
      gate[5] = std::numeric_limits<float>::quiet_NaN();
      std::vector<float> y(gate.size()), one(1);
      const Activation which = silu ? Activation::kSilu : Activation::kGeluTanh;
      kernel->gate({which, gate.data(), up.data(), static_cast<std::int64_t>(y.size()), y.data()});
      expect(std::isnan(y[5]), "an activation of what is none");
      for (std::size_t i = 0; i < y.size(); ++i) {
        if (i == 5) continue;
        const double g = double{gate[i]};
        const double exact = silu ? g / (1 + std::exp(-g))
                                  : 0.5 * g * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) *
                                                             (g + 0.044715 * g * g * g)));
        expect(std::fabs(double{y[i]} - 0.75 * exact) < 1e-6 * (1 + std::fabs(g)),
               "an activation against float64");
        kernel->gate({which, &gate[i], &up[i], 1, one.data()});
        expect(one[0] == y[i], "a value alone");
      }
    }
}

}  // namespace

void check_around() {
  check_norms();
  check_activations();
}
