// The plain form: what every other one is held to, and what runs on any CPU.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "product.h"

namespace headport::kernels {
namespace {

constexpr float kLargest = 32767.0F;

// Where activation k waits, see product.h.
std::int64_t place(std::int64_t k, const Form& form) {
  const std::int64_t in_group = k % form.group();
  const std::int64_t folds = form.group() / kNumbers;
  return k - in_group + in_group % folds * kNumbers + in_group / folds;
}

void round_block(const float* x, std::int64_t from, const Form& form, std::int16_t* q, float* step,
                 std::int32_t* offset) {
  const std::int64_t to = std::min(form.K, from + form.block);
  float largest = 0.0F;
  bool finite = true;
  for (std::int64_t k = from; k < to; ++k) {
    largest = std::max(largest, std::fabs(x[k]));
    finite = finite && std::isfinite(x[k]);
  }
  const std::int64_t parts = kParts * form.block / form.span();
  const std::int64_t first = from / form.span() * kParts + from % form.span() / form.block * parts;
  std::fill_n(step + first, parts,
              finite ? largest / kLargest : std::numeric_limits<float>::quiet_NaN());
  const float inverse = kLargest / largest;  // infinite where all is (nearly) zero
  if (!finite || !std::isfinite(inverse)) return;
  for (std::int64_t k = from; k < to; ++k) {
    const auto whole = static_cast<std::int16_t>(std::lrintf(x[k] * inverse));
    const std::int64_t at = place(k, form);
    q[at] = whole;
    offset[k / form.span() * kParts + at % kNumbers / 2] -= form.zero_point() * whole;
  }
}

void round(const Operands& o, std::int64_t from, std::int64_t to) {
  const Form& form = o.form;
  const std::int64_t steps = form.spans() * kParts;
  for (std::int64_t row = from; row < to; ++row) {
    std::int16_t* q = o.rounded.q + row * form.padded();
    float* step = o.rounded.step + row * steps;
    std::int32_t* offset = o.rounded.offset + row * steps;
    std::fill_n(q, form.padded(), std::int16_t{0});
    std::fill_n(step, steps, 0.0F);
    std::fill_n(offset, steps, 0);
    for (std::int64_t k = 0; k < form.K; k += form.block)
      round_block(o.x + row * form.K, k, form, q, step, offset);
  }
}

std::int32_t stored(const std::uint8_t* row, std::int64_t k, int bits) {
  if (bits == 8) return row[k];
  return k % 2 == 0 ? row[k / 2] & 15 : row[k / 2] >> 4;
}

void multiply(const Operands& o, std::int64_t from, std::int64_t to) {
  const Form& form = o.form;
  const std::int64_t blocks = form.blocks();
  const std::int64_t steps = form.spans() * kParts;
  const std::int64_t parts = kParts * form.block / form.span();
  for (std::int64_t n = from; n < to; ++n)
    for (std::int64_t row = 0; row < o.rows; ++row) {
      const std::uint8_t* weight = o.weight + n * form.row_bytes();
      const std::int16_t* q = o.rounded.q + row * form.padded();
      const float* step = o.rounded.step + row * steps;
      const std::int32_t* offset = o.rounded.offset + row * steps;
      float total = 0.0F;
      for (std::int64_t b = 0; b < blocks; ++b) {
        std::int32_t sum = std::accumulate(offset + b * parts, offset + (b + 1) * parts, 0);
        for (std::int64_t k = b * form.block; k < (b + 1) * form.block; ++k)
          sum += stored(weight, k, form.bits) * q[place(k, form)];
        total += static_cast<float>(sum) * (o.scale[n * blocks + b] * step[b * parts]);
      }
      o.y[row * form.N + n] = total;
    }
}

void attend(const Attended& a) {
  float most = -std::numeric_limits<float>::infinity();
  for (std::int64_t j = 0; j < a.count; ++j) {
    float dot = 0.0F;
    for (std::int64_t i = 0; i < a.D; ++i) dot += a.query[i] * a.keys[j * a.D + i];
    a.scores[j] = dot;
    most = std::max(most, dot);
  }
  std::fill_n(a.out, a.D, 0.0F);
  float total = 0.0F;
  for (std::int64_t j = 0; j < a.count; ++j) {
    const float weight = std::exp(a.scores[j] - most);
    total += weight;
    for (std::int64_t i = 0; i < a.D; ++i) a.out[i] += weight * a.values[j * a.D + i];
  }
  for (std::int64_t i = 0; i < a.D; ++i) a.out[i] /= total;
}

void normalise(const Normalised& n) {
  float total = 0.0F;
  for (std::int64_t k = 0; k < n.K; ++k) {
    n.sum[k] = n.skip == nullptr ? n.x[k] : n.x[k] + n.skip[k];
    total += n.sum[k] * n.sum[k];
  }
  const float factor = 1.0F / std::sqrt(total / static_cast<float>(n.K) + n.epsilon);
  for (std::int64_t k = 0; k < n.K; ++k) n.normed[k] = n.sum[k] * factor * n.gamma[k];
}

void gate(const Gated& g) {
  for (std::int64_t i = 0; i < g.count; ++i) {
    const float v = g.gate[i];
    const float t =
        g.activation == Activation::kSilu ? v : v * (kGeluLinear + kGeluCubic * v * v);
    g.y[i] = v / (1.0F + std::exp(-t)) * g.up[i];
  }
}

}  // namespace

const Kernel kPortable{"portable", round, multiply, attend, normalise, gate};

}  // namespace headport::kernels
