// Compiled for AVX2 and FMA; called only where the CPU has both.
#if defined(__x86_64__)
#include "avx2.h"
#include "scratch.h"

#include <algorithm>

namespace headport::kernels {
namespace {

// Weights are read once, front to back. Hardware stops looking ahead at the end of each page, which
// costs half of the speed of memory; in bytes, far enough for its latency.
constexpr std::int64_t kAhead = 2048;
constexpr std::int64_t kBytes = 32;  // of a group

__m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// Weights of a group, sixteen at a time, in the order of their activations.
struct Eight {
  static constexpr int kFolds = 2;
  static void unpack(__m256i both, __m256i* parts) {
    parts[0] = _mm256_and_si256(both, _mm256_set1_epi16(255));
    parts[1] = _mm256_srli_epi16(both, 8);
  }
};

struct Four {
  static constexpr int kFolds = 4;
  static void unpack(__m256i all, __m256i* parts) {
    const __m256i low = _mm256_set1_epi16(15);
    parts[0] = _mm256_and_si256(all, low);
    parts[1] = _mm256_and_si256(_mm256_srli_epi16(all, 4), low);
    parts[2] = _mm256_and_si256(_mm256_srli_epi16(all, 8), low);
    parts[3] = _mm256_srli_epi16(all, 12);
  }
};

// A group: 32 bytes, or the 16 with which a row ends in the midst of a span of two blocks.
template <bool Pairs>
__m256i load_group(const std::uint8_t* from, const std::uint8_t* end) {
  if (!Pairs || end - from >= kBytes) return load(from);
  return _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// Keeps what several products read in a register; from memory each would load it anew.
__m256i held(__m256i v) {
  __asm__("" : "+x"(v));
  return v;
}

// A form's sizes, which take divisions.
struct Sizes {
  std::int64_t blocks, row_bytes, span, spans, padded;

  explicit Sizes(const Form& form)
      : blocks(form.blocks()),
        row_bytes(form.row_bytes()),
        span(form.span()),
        spans(form.spans()),
        padded(form.padded()) {}
};

// A row's scales of a span: one for all parts, or one of a pair of blocks for each half of them.
template <bool Pairs>
__m256 scales_at(const float* scale, std::int64_t span, std::int64_t blocks) {
  if constexpr (!Pairs) return _mm256_broadcast_ss(scale + span);
  const float* first = scale + 2 * span;
  const bool both = 2 * span + 1 < blocks;
  return _mm256_set_m128(both ? _mm_broadcast_ss(first + 1) : _mm_setzero_ps(),
                         _mm_broadcast_ss(first));
}

// One row of the weight with one of x; one stream of memory is read fastest.
template <typename Bits, bool Pairs>
float dot(const Operands& o, const Sizes& size, std::int64_t n, std::int64_t row) {
  const std::uint8_t* weight = o.weight + n * size.row_bytes;
  const std::uint8_t* const end = weight + size.row_bytes;
  const float* const scale = o.scale + n * size.blocks;
  const std::int64_t steps = size.spans * kParts;
  const std::int32_t* const offset = o.rounded.offset + row * steps;
  const float* const step = o.rounded.step + row * steps;
  const std::int16_t* q = o.rounded.q + row * size.padded;
  const std::int64_t groups = size.span / (Bits::kFolds * kNumbers);
  const std::int64_t spans = size.spans;
  __m256 total = _mm256_setzero_ps();
  for (std::int64_t s = 0; s < spans; ++s) {
    __m256i sum = load(offset + s * kParts);
    for (std::int64_t g = 0; g < groups; ++g) {
      _mm_prefetch(reinterpret_cast<const char*>(weight + kAhead), _MM_HINT_T0);
      __m256i parts[Bits::kFolds];
      Bits::unpack(load_group<Pairs>(weight, end), parts);
      __m256i product = _mm256_madd_epi16(parts[0], load(q));
      for (int i = 1; i < Bits::kFolds; ++i)
        product = _mm256_add_epi32(product, _mm256_madd_epi16(parts[i], load(q + i * kNumbers)));
      sum = _mm256_add_epi32(sum, product);
      weight += kBytes;
      q += Bits::kFolds * kNumbers;
    }
    const __m256 scales = scales_at<Pairs>(scale, s, size.blocks);
    const __m256 unit = _mm256_mul_ps(scales, _mm256_loadu_ps(step + s * kParts));
    total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), unit, total);
  }
  return sum_of(total);
}

// For several rows of x: some rows of the weight, unpacked once, the zero point taken off.
constexpr int kTall = 2;  // rows of the weight and of x at a time: all sums stay in registers
constexpr int kWide = 3;
constexpr int kUnrolled = 2;  // of 16 weights; every span is a multiple
constexpr std::int64_t kFew = 3;  // rows of x for which unpacking into memory does not pay
constexpr std::int64_t kOpenBytes = 12288;  // less than half of a first-level cache
constexpr std::int64_t kMostOpen = 8;

struct Opened {
  std::int16_t* weight;  // [rows, padded]
  float* scale;          // [rows, spans, kParts]
};

template <typename Bits, bool Pairs>
void open(const Operands& o, const Sizes& size, std::int64_t n, std::int64_t rows, const Opened& into) {
  const __m256i zero_point = _mm256_set1_epi16(static_cast<std::int16_t>(o.form.zero_point()));
  std::int16_t* w = into.weight;
  float* scales = into.scale;
  for (std::int64_t row = n; row < n + rows; ++row) {
    const std::uint8_t* weight = o.weight + row * size.row_bytes;
    const std::uint8_t* const end = weight + size.row_bytes;
    for (const std::int16_t* last = w + size.padded; w < last; weight += kBytes) {
      __m256i parts[Bits::kFolds];
      Bits::unpack(load_group<Pairs>(weight, end), parts);
      for (const __m256i& part : parts) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(w), _mm256_sub_epi16(part, zero_point));
        w += kNumbers;
      }
    }
    const float* const scale = o.scale + row * size.blocks;
    for (std::int64_t s = 0; s < size.spans; ++s, scales += kParts)
      _mm256_storeu_ps(scales, scales_at<Pairs>(scale, s, size.blocks));
  }
}

// W opened rows of the weight, the first of which is row n, with X rows of x.
template <int W, int X>
void tile(const Operands& o, const Sizes& size, const std::int16_t* w, const float* scale,
          std::int64_t n, std::int64_t row) {
  const std::int64_t padded = size.padded;
  const std::int64_t span = size.span;
  const std::int64_t steps = size.spans * kParts;
  const std::int16_t* q = o.rounded.q + row * padded;
  const float* step = o.rounded.step + row * steps;
  __m256 total[W][X];
  for (auto& of_row : total)
    for (auto& one : of_row) one = _mm256_setzero_ps();
  for (std::int64_t s = 0; s < steps; s += kParts) {
    __m256i sum[W][X];
    for (auto& of_row : sum)
      for (auto& one : of_row) one = _mm256_setzero_si256();
    for (std::int64_t k = 0; k < span; k += kUnrolled * kNumbers)
      for (int u = 0; u < kUnrolled; ++u) {
        __m256i weights[W];
        for (int i = 0; i < W; ++i) weights[i] = held(load(w + i * padded + k + u * kNumbers));
        for (int x = 0; x < X; ++x) {
          const __m256i activations = held(load(q + x * padded + k + u * kNumbers));
          for (int i = 0; i < W; ++i)
            sum[i][x] = _mm256_add_epi32(sum[i][x], _mm256_madd_epi16(weights[i], activations));
        }
      }
    for (int i = 0; i < W; ++i) {
      const __m256 scales = _mm256_loadu_ps(scale + i * steps + s);
      for (int x = 0; x < X; ++x) {
        const __m256 unit = _mm256_mul_ps(scales, _mm256_loadu_ps(step + x * steps + s));
        total[i][x] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i][x]), unit, total[i][x]);
      }
    }
    w += span;
    q += span;
  }
  for (int i = 0; i < W; ++i)
    for (int x = 0; x < X; ++x) o.y[(row + x) * o.form.N + n + i] = sum_of(total[i][x]);
}

template <int X>
void multiply_opened(const Operands& o, const Sizes& size, const Opened& opened, std::int64_t n,
                     std::int64_t rows, std::int64_t row) {
  const std::int16_t* w = opened.weight;
  const float* scale = opened.scale;
  const std::int64_t steps = size.spans * kParts;
  std::int64_t i = 0;
  for (; i + kTall <= rows; i += kTall)
    tile<kTall, X>(o, size, w + i * size.padded, scale + i * steps, n + i, row);
  for (; i < rows; ++i) tile<1, X>(o, size, w + i * size.padded, scale + i * steps, n + i, row);
}

template <typename Bits, bool Pairs>
void multiply_rows(const Operands& o, const Sizes& size, std::int64_t from, std::int64_t to) {
  const std::int64_t fit = kOpenBytes / (2 * size.padded) / kTall * kTall;
  const std::int64_t most = std::clamp<std::int64_t>(fit, kTall, kMostOpen);
  thread_local Scratch<std::int16_t> weight;
  thread_local Scratch<float> scale;
  const Opened opened{weight.sized(most * size.padded), scale.sized(most * size.spans * kParts)};
  for (std::int64_t n = from; n < to; n += most) {
    const std::int64_t rows = std::min(most, to - n);
    open<Bits, Pairs>(o, size, n, rows, opened);
    std::int64_t row = 0;
    for (; row + kWide <= o.rows; row += kWide)
      multiply_opened<kWide>(o, size, opened, n, rows, row);
    for (; row < o.rows; ++row) multiply_opened<1>(o, size, opened, n, rows, row);
  }
}

template <typename Bits, bool Pairs>
void multiply_as(const Operands& o, std::int64_t from, std::int64_t to) {
  const Sizes size(o.form);
  if (o.rows > kFew) return multiply_rows<Bits, Pairs>(o, size, from, to);
  for (std::int64_t n = from; n < to; ++n)
    for (std::int64_t row = 0; row < o.rows; ++row)
      o.y[row * o.form.N + n] = dot<Bits, Pairs>(o, size, n, row);
}

void multiply(const Operands& o, std::int64_t from, std::int64_t to) {
  if (o.form.bits == 8)
    multiply_as<Eight, false>(o, from, to);
  else if (o.form.span() > o.form.block)
    multiply_as<Four, true>(o, from, to);
  else
    multiply_as<Four, false>(o, from, to);
}

}  // namespace

const Kernel kAvx2{"AVX2", round_avx2, multiply, attend_avx2, normalise_avx2, gate_avx2};

}  // namespace headport::kernels
#endif
