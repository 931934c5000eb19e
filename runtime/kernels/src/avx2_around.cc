// What goes before and after a product. Compiled for AVX2 and FMA; called only where the CPU has both.
#if defined(__x86_64__)
#include "avx2.h"

#include <cmath>

namespace headport::kernels {
namespace {

constexpr std::int64_t kLanes = 8;

// 1 / (1 + exp(-t)), from exp(-|t|) so that nothing overflows.
__m256 sigmoid(__m256 t) {
  const __m256 sign = _mm256_set1_ps(-0.0F);
  const __m256 one = _mm256_set1_ps(1.0F);
  const __m256 e = exp_of(_mm256_or_ps(sign, t));
  const __m256 upper = _mm256_blendv_ps(one, e, t);  // e where t is negative
  return _mm256_div_ps(upper, _mm256_add_ps(one, e));
}

template <Activation Which>
__m256 activated(__m256 g) {
  if constexpr (Which == Activation::kSilu) return _mm256_mul_ps(g, sigmoid(g));
  const __m256 inner = _mm256_fmadd_ps(_mm256_mul_ps(g, g), _mm256_set1_ps(kGeluCubic),
                                       _mm256_set1_ps(kGeluLinear));
  return _mm256_mul_ps(g, sigmoid(_mm256_mul_ps(g, inner)));
}

template <Activation Which>
void gate_as(const Gated& g) {
  std::int64_t i = 0;
  for (; i + kLanes <= g.count; i += kLanes)
    _mm256_storeu_ps(g.y + i, _mm256_mul_ps(activated<Which>(_mm256_loadu_ps(g.gate + i)),
                                            _mm256_loadu_ps(g.up + i)));
  if (i == g.count) return;
  // The same arithmetic for what is left, so that a value does not depend on its place.
  alignas(32) float rest[kLanes] = {};
  for (std::int64_t k = i; k < g.count; ++k) rest[k - i] = g.gate[k];
  _mm256_store_ps(rest, activated<Which>(_mm256_load_ps(rest)));
  for (std::int64_t k = i; k < g.count; ++k) g.y[k] = rest[k - i] * g.up[k];
}

}  // namespace

void gate_avx2(const Gated& g) {
  if (g.activation == Activation::kSilu)
    gate_as<Activation::kSilu>(g);
  else
    gate_as<Activation::kGeluTanh>(g);
}

void normalise_avx2(const Normalised& n) {
  __m256 squares = _mm256_setzero_ps();
  std::int64_t k = 0;
  for (; k + kLanes <= n.K; k += kLanes) {
    __m256 v = _mm256_loadu_ps(n.x + k);
    if (n.skip != nullptr) v = _mm256_add_ps(v, _mm256_loadu_ps(n.skip + k));
    _mm256_storeu_ps(n.sum + k, v);
    squares = _mm256_fmadd_ps(v, v, squares);
  }
  float total = sum_of(squares);
  for (; k < n.K; ++k) {
    n.sum[k] = n.skip == nullptr ? n.x[k] : n.x[k] + n.skip[k];
    total += n.sum[k] * n.sum[k];
  }
  const float factor = 1.0F / std::sqrt(total / static_cast<float>(n.K) + n.epsilon);
  const __m256 factors = _mm256_set1_ps(factor);
  for (k = 0; k + kLanes <= n.K; k += kLanes)
    _mm256_storeu_ps(n.normed + k, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(n.sum + k), factors),
                                                 _mm256_loadu_ps(n.gamma + k)));
  for (; k < n.K; ++k) n.normed[k] = n.sum[k] * factor * n.gamma[k];
}

}  // namespace headport::kernels
#endif
