// The plain form: what every other one is held to, and what runs on any CPU.
#include <algorithm>
#include <cmath>
#include <limits>

#include "product.h"

namespace headport::kernels {
namespace {

// Where one row's whole numbers lie, of either width.
template <typename Whole, typename Offset>
struct Row {
  static constexpr bool kWords = sizeof(Whole) == 2;
  static constexpr float kLargest = kWords ? 32767.0F : 127.0F;
  static constexpr std::int64_t kWide = kWords ? kGroup : kByteGroup;  // of a group

  Whole* q;
  std::int64_t padded;
  float* step;
  Offset* offset;
  std::int64_t sums;    // sets of parts
  std::int64_t of_sum;  // activations of a set

  static std::int64_t place(std::int64_t k) {
    const std::int64_t in_group = k % kWide;
    return k - in_group + in_group / 2 + (in_group % 2) * (kWide / 2);
  }
  Offset& part(std::int64_t k) const {
    return offset[k / of_sum * (kWide / 4) + k % kWide / 4];
  }
};

Row<std::int16_t, std::int32_t> words_of(const Operands& o, std::int64_t row) {
  const std::int64_t padded = o.form.padded();
  const std::int64_t blocks = o.form.blocks();
  return {o.rounded.q + row * padded, padded, o.rounded.step + row * blocks,
          o.rounded.offset + row * blocks * kParts, blocks, o.form.block};
}

Row<std::int8_t, std::int16_t> bytes_of(const Operands& o, std::int64_t row) {
  const std::int64_t padded = RoundedBytes::padded(o.form);
  const std::int64_t sums = RoundedBytes::sums(o.form);
  return {o.bytes.q + row * padded, padded, o.bytes.step + row * o.form.blocks(),
          o.bytes.offset + row * sums * kByteParts, sums, padded / sums};
}

template <typename Whole, typename Offset>
void round_row(const Row<Whole, Offset>& row, const float* x, const Form& form) {
  std::fill_n(row.q, row.padded, Whole{0});
  std::fill_n(row.offset, row.sums * (row.kWide / 4), Offset{0});
  for (std::int64_t b = 0; b < form.blocks(); ++b) {
    const std::int64_t end = std::min(form.K, (b + 1) * form.block);
    float largest = 0.0F;
    bool finite = true;
    for (std::int64_t k = b * form.block; k < end; ++k) {
      largest = std::max(largest, std::fabs(x[k]));
      finite = finite && std::isfinite(x[k]);
    }
    const float inverse = row.kLargest / largest;  // infinite where all is (nearly) zero
    row.step[b] = finite ? largest / row.kLargest : std::numeric_limits<float>::quiet_NaN();
    if (!finite || !std::isfinite(inverse)) continue;
    for (std::int64_t k = b * form.block; k < end; ++k) {
      const auto whole = static_cast<Whole>(std::lrintf(x[k] * inverse));
      row.q[row.place(k)] = whole;
      row.part(k) = static_cast<Offset>(row.part(k) - form.zero_point() * whole);
    }
  }
}

// 32 weights, the even ones and then the odd ones, so that both factors lie side by side.
void unpack(const std::uint8_t* bytes, int bits, std::int32_t* weights) {
  constexpr std::int64_t half = kGroup / 2;
  for (std::int64_t i = 0; i < half; ++i) {
    weights[i] = bits == 8 ? bytes[2 * i] : bytes[i] & 15;
    weights[i + half] = bits == 8 ? bytes[2 * i + 1] : bytes[i] >> 4;
  }
}

// Σ over a block of one row of the weight with one of x.
template <typename Whole, typename Offset>
std::int32_t sum_of_block(const Row<Whole, Offset>& row, const std::uint8_t* weight,
                          const Form& form, std::int64_t b) {
  const std::int64_t begin = b * form.block;
  std::int32_t sum = 0;
  for (std::int64_t k = begin; k < begin + std::min(form.block, row.kWide); k += 4)
    sum += row.part(k);
  for (std::int64_t k = begin; k < begin + form.block; k += kGroup) {
    std::int32_t weights[kGroup];
    unpack(weight + k * form.bits / 8, form.bits, weights);
    const Whole* even = row.q + row.place(k);
    const Whole* odd = row.q + row.place(k + 1);
    for (std::int64_t i = 0; i < kGroup / 2; ++i)
      sum += weights[i] * even[i] + weights[i + kGroup / 2] * odd[i];
  }
  return sum;
}

template <auto RowOf>
void round(const Operands& o, std::int64_t from, std::int64_t to) {
  for (std::int64_t row = from; row < to; ++row)
    round_row(RowOf(o, row), o.x + row * o.form.K, o.form);
}

template <auto RowOf>
void multiply(const Operands& o, std::int64_t from, std::int64_t to) {
  const std::int64_t blocks = o.form.blocks();
  for (std::int64_t row = 0; row < o.rows; ++row) {
    const auto given = RowOf(o, row);
    for (std::int64_t n = from; n < to; ++n) {
      float total = 0.0F;
      for (std::int64_t b = 0; b < blocks; ++b)
        total += static_cast<float>(
                     sum_of_block(given, o.weight + n * o.form.row_bytes(), o.form, b)) *
                 (o.scale[n * blocks + b] * given.step[b]);
      o.y[row * o.form.N + n] = total;
    }
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

std::int64_t next_above(const Keys& keys, std::int64_t from, std::int64_t to, float threshold) {
  while (from < to && keys.at(from) <= threshold) ++from;
  return from;
}

float largest(const float* values, std::int64_t count) {
  return *std::max_element(values, values + count);
}

float exp_sum(const float* values, std::int64_t count, float shift) {
  double total = 0;
  for (std::int64_t i = 0; i < count; ++i) total += double{std::exp(values[i] - shift)};
  return static_cast<float>(total);
}

double dot(const float* weight, const double* x, std::int64_t count) {
  double total = 0;
  for (std::int64_t i = 0; i < count; ++i) total += double{weight[i]} * x[i];
  return total;
}

}  // namespace

const Kernel kPortable{"portable",
                       {round<words_of>, multiply<words_of>},
                       {round<bytes_of>, multiply<bytes_of>},
                       attend,
                       normalise,
                       gate,
                       {next_above, largest, exp_sum, dot}};

}  // namespace headport::kernels
