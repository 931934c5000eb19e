// Products: the plain form and the fast one against float64.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "checks.h"
#include "product.h"

namespace {

using namespace headport::kernels;

// Memory of just the sizes that are promised, so that sanitizers see what reads beyond.
struct Case {
  Form form;
  std::int64_t rows;
  std::vector<float> x, scale, y, step;
  std::vector<std::uint8_t> weight;
  std::vector<std::int16_t> q, byte_offset;
  std::vector<std::int8_t> bytes;
  std::vector<std::int32_t> offset;

  Case(const Form& given, std::int64_t count) : form(given), rows(count) {
    Random random;
    const auto sized = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    x.resize(sized(rows * form.K));
    scale.resize(sized(form.N * form.blocks()));
    y.resize(sized(rows * form.N));
    step.resize(sized(rows * form.blocks()));
    offset.resize(step.size() * kParts);
    q.resize(sized(rows * form.padded()));
    bytes.resize(sized(rows * RoundedBytes::padded(form)));
    byte_offset.resize(sized(rows * RoundedBytes::sums(form) * kByteParts));
    weight.resize(sized(form.N * form.row_bytes()));
    for (float& value : x) value = random.real();
    for (float& value : scale) value = random.real();
    for (std::uint8_t& byte : weight) byte = static_cast<std::uint8_t>(random.next() >> 24);
  }

  void run(const Kernel& kernel) {
    const Operands operands{form,
                            x.data(),
                            rows,
                            weight.data(),
                            scale.data(),
                            {q.data(), step.data(), offset.data()},
                            {bytes.data(), step.data(), byte_offset.data()},
                            y.data()};
    kernel.product(form).round(operands, 0, rows);
    kernel.product(form).multiply(operands, 0, form.N);
  }

  // Largest |Δ| to float64 over what rounding of activations and float32 sums explain.
  double share_of_bound(const Kernel& kernel) {
    run(kernel);
    const double steps = form.activation_bits == 8 ? 2 * 127 : 2 * 32767;
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
            const std::int64_t at = n * form.blocks() * form.block + k;
            const int byte = weight[static_cast<std::size_t>(at * form.bits / 8)];
            const int stored = form.bits == 8 ? byte : k % 2 ? byte >> 4 : byte & 15;
            const double w = unit * (stored - form.zero_point());
            const double value = x[static_cast<std::size_t>(row * form.K + k)];
            exact += w * value;
            bound += std::fabs(w) * (most / steps * 1.001 + std::fabs(value) * 1e-6);
          }
        }
        const double found = y[static_cast<std::size_t>(row * form.N + n)];
        share = std::max(share, std::fabs(found - exact) / bound);
      }
    return share;
  }
};

struct Bits {
  int weight;
  int activation;
};
constexpr Bits kBits[] = {{4, 16}, {8, 16}, {4, 8}};

void check_values() {
  for (const auto [bits, activation_bits] : kBits)
    for (const std::int64_t block : {32, 64, 128, 256})
      for (const std::int64_t K : {block, 3 * block - 20})
        for (const std::int64_t rows : {1, 2, 3, 5, 7, 12}) {
          Case each({27, K, block, bits, activation_bits}, rows);
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

// The largest sums that there can be: all weights at one end, activations of one size in all patterns
// of signs that sixteen bits add up.
void check_extremes() {
  for (const auto [bits, activation_bits] : kBits)
    for (const std::int64_t block : {32, 64, 128, 256})
      for (const int stored : {0x00, 0xFF})
        for (const int period : {1, 2, 4, 64}) {
          Case each({5, 2 * block, block, bits, activation_bits}, 7);
          std::fill(each.weight.begin(), each.weight.end(), static_cast<std::uint8_t>(stored));
          for (std::size_t k = 0; k < each.x.size(); ++k)
            each.x[k] = period > 1 && static_cast<int>(k) / (period / 2) % 2 != 0 ? -3.0F : 3.0F;
          expect(each.share_of_bound(kPortable) < 1, "plain form, extremes");
          expect(each.share_of_bound(find_kernel()) < 1, "fast form, extremes");
        }
}

// What a row gives is the same, bit for bit, whatever is beside it.
void check_rows_alone(const Form& form, std::int64_t rows) {
  Case together(form, rows);
  together.run(find_kernel());
  for (std::int64_t row = 0; row < rows; ++row) {
    Case alone(form, 1);
    alone.weight = together.weight;
    alone.scale = together.scale;
    std::copy_n(together.x.begin() + row * form.K, form.K, alone.x.begin());
    alone.run(find_kernel());
    expect(std::equal(alone.y.begin(), alone.y.end(), together.y.begin() + row * form.N),
           "a row alone");
  }
}

void check_rows_alone() {
  for (const auto [bits, activation_bits] : kBits)
    for (const std::int64_t block : {32, 64, 128, 256})
      for (const std::int64_t K : {2 * block, 3 * block, 3 * block - 20})
        for (const std::int64_t N : {1, 6, 35})
          for (const std::int64_t rows : {7, 10})
            check_rows_alone({N, K, block, bits, activation_bits}, rows);
}

void check_values_that_are_none() {
  for (const Kernel* kernel : {&kPortable, &find_kernel()})
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity()}) {
      for (const auto [bits, activation_bits] : kBits) {
        Case each({4, 64, 32, bits, activation_bits}, 2);
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
}

}  // namespace

void check_products() {
  check_values();
  check_extremes();
  check_rows_alone();
  check_values_that_are_none();
}
