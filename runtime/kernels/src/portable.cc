// The plain form: what every other one is held to, and what runs on any CPU.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "product.h"

namespace headport::kernels {
namespace {

constexpr float kLargest = 32767.0F;

std::int64_t place(std::int64_t k) {
  const std::int64_t in_group = k % kGroup;
  return k - in_group + in_group / 2 + (in_group % 2) * (kGroup / 2);
}

void round_block(const float* x, std::int64_t count, const Form& form, std::int16_t* q, float* step,
                 std::int32_t* offset) {
  float largest = 0.0F;
  bool finite = true;
  for (std::int64_t k = 0; k < count; ++k) {
    largest = std::max(largest, std::fabs(x[k]));
    finite = finite && std::isfinite(x[k]);
  }
  const float inverse = kLargest / largest;  // infinite where all is (nearly) zero
  std::fill_n(q, form.block, std::int16_t{0});
  *step = finite ? largest / kLargest : std::numeric_limits<float>::quiet_NaN();
  std::fill_n(offset, kParts, 0);
  if (!finite || !std::isfinite(inverse)) return;
  for (std::int64_t k = 0; k < count; ++k) {
    const auto whole = static_cast<std::int16_t>(std::lrintf(x[k] * inverse));
    q[place(k)] = whole;
    offset[place(k) % (2 * kParts) / 2] -= form.zero_point() * whole;
  }
}

void round(const Operands& o, std::int64_t from, std::int64_t to) {
  const Form& form = o.form;
  const std::int64_t blocks = form.blocks();
  for (std::int64_t row = from; row < to; ++row)
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t first = b * form.block;
      round_block(o.x + row * form.K + first, std::min(form.block, form.K - first), form,
                  o.rounded.q + row * form.padded() + first, o.rounded.step + row * blocks + b,
                  o.rounded.offset + (row * blocks + b) * kParts);
    }
}

// Bytes of a group → its weights, as the activations wait.
void unpack(const std::uint8_t* bytes, int bits, std::int32_t* weights) {
  for (std::int64_t i = 0; i < kGroup / 2; ++i) {
    weights[i] = bits == 8 ? bytes[2 * i] : bytes[i] & 15;
    weights[i + kGroup / 2] = bits == 8 ? bytes[2 * i + 1] : bytes[i] >> 4;
  }
}

void multiply(const Operands& o, std::int64_t from, std::int64_t to) {
  const Form& form = o.form;
  const std::int64_t blocks = form.blocks();
  const std::int64_t group_bytes = kGroup * form.bits / 8;
  for (std::int64_t n = from; n < to; ++n)
    for (std::int64_t row = 0; row < o.rows; ++row) {
      const std::uint8_t* bytes = o.weight + n * form.row_bytes();
      const std::int16_t* q = o.rounded.q + row * form.padded();
      float total = 0.0F;
      for (std::int64_t b = 0; b < blocks; ++b) {
        const std::int32_t* offset = o.rounded.offset + (row * blocks + b) * kParts;
        std::int32_t sum = std::accumulate(offset, offset + kParts, 0);
        for (std::int64_t g = 0; g < form.block; g += kGroup) {
          std::int32_t weights[kGroup];
          unpack(bytes, form.bits, weights);
          std::int32_t part = 0;
          for (std::int64_t i = 0; i < kGroup; ++i) part += weights[i] * q[i];
          sum += part;
          bytes += group_bytes;
          q += kGroup;
        }
        total += static_cast<float>(sum) * (o.scale[n * blocks + b] * o.rounded.step[row * blocks + b]);
      }
      o.y[row * form.N + n] = total;
    }
}

void attend(const Attended& a) {
  for (std::int64_t q = 0; q < a.queries; ++q) {
    const float* query = a.query + q * a.D;
    float* out = a.found.out + q * a.D;
    float scores[kMostKeys];
    float most = std::numeric_limits<float>::lowest();
    for (std::int64_t j = 0; j < a.count; ++j) {
      float dot = 0.0F;
      for (std::int64_t i = 0; i < a.D; ++i) dot += query[i] * a.keys[j * a.D + i];
      scores[j] = dot;
      most = std::max(most, dot);
    }
    std::fill_n(out, a.D, 0.0F);
    float total = 0.0F;
    for (std::int64_t j = 0; j < a.count; ++j) {
      const float weight = std::exp(scores[j] - most);
      total += weight;
      for (std::int64_t i = 0; i < a.D; ++i) out[i] += weight * a.values[j * a.D + i];
    }
    a.found.most[q] = most;
    a.found.sum[q] = total;
  }
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
