// Rows of x as whole numbers. Compiled for AVX2 and FMA; called only where the CPU has both.
#if defined(__x86_64__)
#include "avx2.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace headport::kernels {
namespace {

constexpr float kLargest = 32767.0F;
constexpr std::int64_t kLongest = 256;  // span

// A block as whole numbers of 32 bits; its step.
float round_block(const float* x, std::int64_t count, std::int32_t* whole) {
  const __m256 sign = _mm256_set1_ps(-0.0F);
  __m256 largest = _mm256_setzero_ps();
  __m256 poison = _mm256_setzero_ps();  // 0 · x: NaN where x is not finite
  for (std::int64_t k = 0; k < count; k += 8) {
    const __m256 v = _mm256_loadu_ps(x + k);
    largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, v));
    poison = _mm256_fmadd_ps(v, _mm256_setzero_ps(), poison);
  }
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, largest);
  const float most = *std::max_element(lanes, lanes + 8);
  const bool finite = sum_of(poison) == 0.0F;
  const float inverse = kLargest / most;
  const bool whole_zero = !finite || !std::isfinite(inverse);
  const __m256 factor = _mm256_set1_ps(inverse);
  for (std::int64_t k = 0; k < count; k += 8) {
    const __m256i v = whole_zero ? _mm256_setzero_si256()
                                 : _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + k), factor));
    _mm256_store_si256(reinterpret_cast<__m256i*>(whole + k), v);
  }
  return finite ? most / kLargest : std::numeric_limits<float>::quiet_NaN();
}

// The even ones of sixteen whole numbers in two registers, or the odd ones.
template <int Which>
__m256i every_second(__m256i a, __m256i b) {
  const __m256 picked = _mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), Which);
  return _mm256_permute4x64_epi64(_mm256_castps_si256(picked), 0xD8);
}
constexpr int kEven = 0x88;
constexpr int kOdd = 0xDD;

__m256i narrowed(__m256i a, __m256i b) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
}

__m256i whole_at(const std::int32_t* from) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
}

// Stores sixteen activations and gives their sums by part.
__m256i store(__m256i sixteen, std::int16_t*& q) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), sixteen);
  q += kNumbers;
  return _mm256_madd_epi16(sixteen, _mm256_set1_epi16(1));
}

__m256i arrange_pairs(const std::int32_t* whole, std::int16_t*& q) {  // of 32, for 8 bits
  const __m256i v[4] = {whole_at(whole), whole_at(whole + 8), whole_at(whole + 16),
                        whole_at(whole + 24)};
  const __m256i even = narrowed(every_second<kEven>(v[0], v[1]), every_second<kEven>(v[2], v[3]));
  const __m256i odd = narrowed(every_second<kOdd>(v[0], v[1]), every_second<kOdd>(v[2], v[3]));
  const __m256i first = store(even, q);
  return _mm256_add_epi32(first, store(odd, q));
}

__m256i arrange_fours(const std::int32_t* whole, std::int16_t*& q) {  // of 64, for 4 bits
  __m256i even[4];
  __m256i odd[4];
  for (int i = 0; i < 4; ++i) {
    const __m256i a = whole_at(whole + 16 * i);
    const __m256i b = whole_at(whole + 16 * i + 8);
    even[i] = every_second<kEven>(a, b);
    odd[i] = every_second<kOdd>(a, b);
  }
  const auto picked = [](const __m256i* v, auto pick) { return narrowed(pick(v[0], v[1]), pick(v[2], v[3])); };
  __m256i sum = store(picked(even, every_second<kEven>), q);
  sum = _mm256_add_epi32(sum, store(picked(odd, every_second<kEven>), q));
  sum = _mm256_add_epi32(sum, store(picked(even, every_second<kOdd>), q));
  return _mm256_add_epi32(sum, store(picked(odd, every_second<kOdd>), q));
}

void round_span(const float* x, const Form& form, std::int16_t* q, float* step,
                std::int32_t* offset) {
  alignas(32) std::int32_t whole[kLongest];
  const std::int64_t parts = kParts * form.block / form.span();
  for (std::int64_t k = 0; k < form.span(); k += form.block, step += parts)
    std::fill_n(step, parts, round_block(x + k, form.block, whole + k));
  __m256i sum = _mm256_setzero_si256();
  for (std::int64_t k = 0; k < form.span(); k += form.group())
    sum = _mm256_add_epi32(
        sum, form.bits == 8 ? arrange_pairs(whole + k, q) : arrange_fours(whole + k, q));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(offset),
                      _mm256_mullo_epi32(sum, _mm256_set1_epi32(-form.zero_point())));
}

}  // namespace

void round_avx2(const Operands& o, std::int64_t from, std::int64_t to) {
  const Form& form = o.form;
  const std::int64_t span = form.span();
  float last[kLongest];  // a span that K does not fill
  for (std::int64_t row = from; row < to; ++row)
    for (std::int64_t s = 0; s < form.spans(); ++s) {
      const std::int64_t first = s * span;
      const float* x = o.x + row * form.K + first;
      if (form.K - first < span) {
        std::fill_n(std::copy_n(x, form.K - first, last), span - (form.K - first), 0.0F);
        x = last;
      }
      const std::int64_t at = (row * form.spans() + s) * kParts;
      round_span(x, form, o.rounded.q + row * form.padded() + first, o.rounded.step + at,
                 o.rounded.offset + at);
    }
}

}  // namespace headport::kernels
#endif
