// The plain form against float64, the fast one against the plain one, and faults that must be found.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "product.h"
#include "selftest.h"

namespace {

using namespace headport::kernels;

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  ++failures;
}

struct Case {
  Form form;
  std::int64_t rows;
  std::vector<float> x, scale, y, step;
  std::vector<std::uint8_t> weight;
  std::vector<std::int16_t> q;
  std::vector<std::int32_t> offset;

  Case(const Form& given, std::int64_t count) : form(given), rows(count) {
    std::uint32_t state = 7;
    const auto next = [&state] { return state = state * 1664525U + 1013904223U; };
    const auto real = [&next] { return static_cast<float>(next() >> 8) / 8388608.0F - 1.0F; };
    const auto sized = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    x.resize(sized(rows * form.K));
    scale.resize(sized(form.N * form.blocks()));
    y.resize(sized(rows * form.N));
    step.resize(sized(rows * form.blocks()));
    offset.resize(step.size() * kParts);
    q.resize(sized(rows * form.padded()));
    weight.resize(sized(form.N * form.row_bytes()));
    for (float& value : x) value = real();
    for (float& value : scale) value = real();
    for (std::uint8_t& byte : weight) byte = static_cast<std::uint8_t>(next() >> 24);
  }

  void run(const Kernel& kernel) {
    const Operands operands{form,         x.data(),
                            rows,         weight.data(),
                            scale.data(), {q.data(), step.data(), offset.data()},
                            y.data()};
    kernel.round(operands, 0, rows);
    kernel.multiply(operands, 0, form.N);
  }

  // Largest |Δ| to float64 over what rounding of activations and float32 sums explain.
  double share_of_bound(const Kernel& kernel) {
    run(kernel);
    double share = 0;
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t n = 0; n < form.N; ++n) {
        double exact = 0, bound = 0;
        for (std::int64_t b = 0; b < form.blocks(); ++b) {
          const std::int64_t end = std::min(form.K, (b + 1) * form.block);
          const double unit = scale[static_cast<std::size_t>(n * form.blocks() + b)];
          double most = 0;
          for (std::int64_t k = b * form.block; k < end; ++k)
            most = std::max(most, std::fabs(double{x[static_cast<std::size_t>(row * form.K + k)]}));
          for (std::int64_t k = b * form.block; k < end; ++k) {
            const std::int64_t at = n * form.padded() + k;
            const int byte = weight[static_cast<std::size_t>(at * form.bits / 8)];
            const int stored = form.bits == 8 ? byte : k % 2 ? byte >> 4 : byte & 15;
            const double w = unit * (stored - form.zero_point());
            const double value = x[static_cast<std::size_t>(row * form.K + k)];
            exact += w * value;
            bound += std::fabs(w) * (most / 65534 * 1.001 + std::fabs(value) * 1e-6);
          }
        }
        const double found = y[static_cast<std::size_t>(row * form.N + n)];
        share = std::max(share, std::fabs(found - exact) / bound);
      }
    return share;
  }
};

void check_values() {
  for (const int bits : {4, 8})
    for (const std::int64_t block : {32, 64, 128, 256})
      for (const std::int64_t K : {block, 3 * block - 20})
        for (const std::int64_t rows : {1, 2, 3, 5, 7, 12}) {
          Case each({27, K, block, bits}, rows);
          expect(each.share_of_bound(kPortable) < 1, "plain form against float64");
          expect(each.share_of_bound(find_kernel()) < 1, "fast form against float64");
          // All of one sign, weights near the zero point: large sums that nearly cancel.
          for (float& value : each.x) value = 0.5F + std::fabs(value) / 2;
          for (std::uint8_t& byte : each.weight)
            byte = bits == 8 ? static_cast<std::uint8_t>(127 + byte % 3) : (byte % 2 ? 0x89 : 0x78);
          expect(each.share_of_bound(kPortable) < 1, "plain form, one sign");
          expect(each.share_of_bound(find_kernel()) < 1, "fast form, one sign");
        }
}

// What a row gives is the same, bit for bit, whatever is beside it.
void check_rows_alone() {
  Case together({6, 96, 32, 8}, 7);
  together.run(find_kernel());
  for (std::int64_t row = 0; row < together.rows; ++row) {
    Case alone({6, 96, 32, 8}, 1);
    alone.weight = together.weight;
    alone.scale = together.scale;
    for (std::size_t k = 0; k < 96; ++k)
      alone.x[k] = together.x[static_cast<std::size_t>(row) * 96 + k];
    alone.run(find_kernel());
    for (std::size_t n = 0; n < 6; ++n)
      expect(alone.y[n] == together.y[static_cast<std::size_t>(row) * 6 + n], "a row alone");
  }
}

void check_values_that_are_none() {
  for (const Kernel* kernel : {&kPortable, &find_kernel()})
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity()}) {
      Case each({4, 64, 32, 8}, 2);
      each.x[40] = bad;
      each.run(*kernel);
      for (std::size_t n = 0; n < 4; ++n) {
        expect(std::isnan(each.y[n]), "a row that holds NaN or infinity gives NaN");
        expect(std::isfinite(each.y[4 + n]), "and no other row does");
      }
      for (float& value : each.x) value = 1e-42F;  // its inverse is infinite
      each.run(*kernel);
      for (const float value : each.y) expect(value == 0.0F, "next to nothing gives zero");
    }
}

// Attention against float64, for few and many keys, flat scores and steep ones.
void check_attention() {
  for (const std::int64_t D : {8, 20, 64, 96})
    for (const std::int64_t count : {1, 7, 8, 300})
      for (const float steep : {0.5F, 30.0F})
        for (const Kernel* kernel : {&kPortable, &find_kernel()}) {
          Case from({1, count * D, 32, 8}, 3);  // keys, values, and a query in front of the rest
          const float* keys = from.x.data();
          const float* values = keys + count * D;
          std::vector<float> query(values + count * D, values + count * D + D);
          for (float& value : query) value *= steep;
          std::vector<double> weight(static_cast<std::size_t>(count));
          double most = -1e30, total = 0;
          for (std::int64_t j = 0; j < count; ++j) {
            double dot = 0;
            for (std::int64_t i = 0; i < D; ++i)
              dot += double{query[static_cast<std::size_t>(i)]} * double{keys[j * D + i]};
            weight[static_cast<std::size_t>(j)] = dot;
            most = std::max(most, dot);
          }
          for (double& each : weight) total += each = std::exp(each - most);
          std::vector<float> scores(static_cast<std::size_t>(count) + 8);
          std::vector<float> out(static_cast<std::size_t>(D));
          kernel->attend({query.data(), keys, values, count, D, scores.data(), out.data()});
          for (std::int64_t i = 0; i < D; ++i) {
            double exact = 0;
            for (std::int64_t j = 0; j < count; ++j)
              exact += weight[static_cast<std::size_t>(j)] / total * double{values[j * D + i]};
            const double apart = std::fabs(exact - double{out[static_cast<std::size_t>(i)]});
            expect(apart < 1e-6 * (1 + steep), "attention against float64");
          }
          query[0] = std::numeric_limits<float>::quiet_NaN();
          kernel->attend({query.data(), keys, values, count, D, scores.data(), out.data()});
          expect(std::isnan(out[0]), "a query that is none gives NaN");
        }
}

// Faults that a kernel could have, each found by the self-test.
void without_offset(const Operands& o, std::int64_t from, std::int64_t to) {
  kPortable.round(o, from, to);
  for (std::int64_t i = from * o.form.blocks() * kParts; i < to * o.form.blocks() * kParts; ++i)
    o.rounded.offset[i] = 0;
}
void swapped(const Operands& o, std::int64_t from, std::int64_t to) {
  kPortable.round(o, from, to);
  std::swap(o.rounded.q[from * o.form.padded()], o.rounded.q[from * o.form.padded() + 16]);
}
void without_last_output(const Operands& o, std::int64_t from, std::int64_t to) {
  for (std::int64_t i = 0; i < o.rows * o.form.N; ++i) o.y[i] = 0;
  kPortable.multiply(o, from, to - 1);
}
void without_last_block(const Operands& o, std::int64_t from, std::int64_t to) {
  kPortable.round(o, from, to);
  o.rounded.step[to * o.form.blocks() - 1] = 0;
}

void without_last_key(const Attended& a) {
  Attended less = a;
  if (less.count > 1) --less.count;
  kPortable.attend(less);
}
void without_maximum(const Attended& a) {  // overflows where scores are large
  kPortable.attend(a);
  for (std::int64_t j = 0; j < a.count; ++j)
    if (a.scores[j] > 88.0F) a.out[0] = std::numeric_limits<float>::quiet_NaN();
}

void check_faults_are_found() {
  expect(find_fault(find_kernel()).empty(), "the fast form passes");
  expect(find_fault(kPortable).empty(), "the plain form passes");
  const Kernel broken[] = {
      {"offset", without_offset, kPortable.multiply, kPortable.attend},
      {"order", swapped, kPortable.multiply, kPortable.attend},
      {"output", kPortable.round, without_last_output, kPortable.attend},
      {"block", without_last_block, kPortable.multiply, kPortable.attend},
      {"last key", kPortable.round, kPortable.multiply, without_last_key},
      {"maximum", kPortable.round, kPortable.multiply, without_maximum}};
  for (const Kernel& kernel : broken) expect(!find_fault(kernel).empty(), kernel.name);
}

}  // namespace

int main() {
  check_values();
  check_rows_alone();
  check_values_that_are_none();
  check_attention();
  check_faults_are_found();
  if (failures == 0) std::printf("%s: all checks passed\n", find_kernel().name);
  return failures == 0 ? 0 : 1;
}
