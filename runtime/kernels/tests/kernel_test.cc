// The plain form against float64, the fast one against the plain one, and faults that must be found.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "attention_parts.h"
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
  std::vector<std::int16_t> q, byte_offset;
  std::vector<std::int8_t> bytes;
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
    bytes.resize(sized(rows * RoundedBytes::padded(form)));
    byte_offset.resize(sized(rows * RoundedBytes::sums(form) * kByteParts));
    weight.resize(sized(form.N * form.row_bytes()));
    for (float& value : x) value = real();
    for (float& value : scale) value = real();
    for (std::uint8_t& byte : weight) byte = static_cast<std::uint8_t>(next() >> 24);
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

// Queries against keys and values in chunks, as the operator does it.
struct Asked {
  std::int64_t queries, count, D;
  std::vector<float> query, keys, values;

  Asked(std::int64_t asked, std::int64_t among, std::int64_t size, float steep)
      : queries(asked), count(among), D(size) {
    const Case from({1, 2 * count * D + queries * D, 32, 8}, 1);
    const float* next = from.x.data();
    keys.assign(next, next + count * D);
    values.assign(next + count * D, next + 2 * count * D);
    query.assign(next + 2 * count * D, next + 2 * count * D + queries * D);
    for (float& value : query) value *= steep;
  }

  std::vector<float> run(const Kernel& kernel, std::int64_t first_query, std::int64_t some) const {
    std::vector<float> made(static_cast<std::size_t>(2 * some * (D + 2)));
    const auto weighed = [&](float* begin) {
      return Weighed{begin + some * D, begin + some * D + some, begin};
    };
    const Weighed found = weighed(made.data());
    const Weighed next = weighed(made.data() + some * (D + 2));
    for (std::int64_t j = 0; j < count; j += kMostKeys) {
      kernel.attend({query.data() + first_query * D, some, keys.data() + j * D,
                     values.data() + j * D, std::min(kMostKeys, count - j), D,
                     j == 0 ? found : next});
      if (j > 0) fold(found, next, some, D);
    }
    finish(found, some, D);
    made.resize(static_cast<std::size_t>(some * D));
    return made;
  }

  std::vector<double> exact(std::int64_t q) const {
    const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
    std::vector<double> weight(at(count)), out(at(D));
    double most = -1e30, total = 0;
    for (std::int64_t j = 0; j < count; ++j) {
      for (std::int64_t i = 0; i < D; ++i)
        weight[at(j)] += double{query[at(q * D + i)]} * double{keys[at(j * D + i)]};
      most = std::max(most, weight[at(j)]);
    }
    for (double& each : weight) total += each = std::exp(each - most);
    for (std::int64_t j = 0; j < count; ++j)
      for (std::int64_t i = 0; i < D; ++i)
        out[at(i)] += weight[at(j)] / total * double{values[at(j * D + i)]};
    return out;
  }
};

// Attention against float64: groups of all sizes, few and many keys, flat scores and steep ones. A
// query gives the same bit for bit alone.
void check_attention() {
  for (const std::int64_t queries : {1, 2, 3, 4, 5, 7, 8})
    for (const std::int64_t D : {8, 20, 64, 96})
      for (const std::int64_t count : {1, 7, 8, 127, 128, 129, 300})
        for (const float steep : {0.5F, 30.0F})
          for (const Kernel* kernel : {&kPortable, &find_kernel()}) {
            Asked asked(queries, count, D, steep);
            const std::vector<float> out = asked.run(*kernel, 0, queries);
            for (std::int64_t q = 0; q < queries; ++q) {
              const std::vector<double> exact = asked.exact(q);
              for (std::int64_t i = 0; i < D; ++i) {
                const float found = out[static_cast<std::size_t>(q * D + i)];
                expect(std::fabs(exact[static_cast<std::size_t>(i)] - double{found}) <
                           1e-6 * (1 + double{steep}),
                       "attention against float64");
              }
              const std::vector<float> alone = asked.run(*kernel, q, 1);
              expect(std::equal(alone.begin(), alone.end(), out.begin() + q * D), "a query alone");
            }
          }
}

// What is none, and keys that are infinitely far: a key, or a whole chunk, that scores -infinity
// weighs nothing; where all do, and where a score is NaN or infinity, the result is NaN.
void check_attention_to_none() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const Kernel* kernel : {&kPortable, &find_kernel()})
    for (const std::int64_t count : {5, 128, 300}) {
      Asked asked(3, count, 64, 1.0F);
      for (std::int64_t q = 0; q < 3; ++q) asked.query[static_cast<std::size_t>(q * 64)] = 1.0F;
      const auto runs = [&](std::int64_t from, std::int64_t to, float key) {
        Asked changed = asked;
        for (std::int64_t j = from; j < to; ++j) changed.keys[static_cast<std::size_t>(j * 64)] = key;
        return changed.run(*kernel, 0, 3);
      };
      for (const std::int64_t j : {std::int64_t{0}, count / 2, count - 1})
        for (const float bad : {kInfinity, std::numeric_limits<float>::quiet_NaN()})
          for (const float value : runs(j, j + 1, bad))
            expect(std::isnan(value), "a score that is none gives NaN");
      for (const float value : runs(0, count, -kInfinity))
        expect(std::isnan(value), "nothing that weighs anything gives NaN");
      const std::int64_t far = std::min(kMostKeys, count - 1);
      Asked rest(3, count, 64, 1.0F);
      rest.query = asked.query;
      rest.keys.erase(rest.keys.begin(), rest.keys.begin() + far * 64);
      rest.values.erase(rest.values.begin(), rest.values.begin() + far * 64);
      rest.count -= far;
      const std::vector<float> expected = rest.run(*kernel, 0, 3), found = runs(0, far, -kInfinity);
      for (std::size_t i = 0; i < found.size(); ++i)
        expect(std::fabs(found[i] - expected[i]) < 1e-6F, "what is infinitely far weighs nothing");
      asked.query[64] = std::numeric_limits<float>::quiet_NaN();
      const std::vector<float> out = asked.run(*kernel, 0, 3);
      for (std::size_t i = 0; i < out.size(); ++i)
        expect(std::isnan(out[i]) == (i / 64 == 1), "a query that is none gives NaN, no other does");
    }
}

// Norms and activations against float64.
void check_around() {
  for (const Kernel* kernel : {&kPortable, &find_kernel()})
    for (const std::int64_t K : {4, 8, 30, 576})
      for (const bool skips : {false, true}) {
        const Case from({1, 3 * K, 32, 8}, 1);
        const float* x = from.x.data();
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

// Faults that a kernel could have, each found by the self-test.
void without_offset(const Operands& o, std::int64_t from, std::int64_t to) {
  kPortable.words.round(o, from, to);
  for (std::int64_t i = from * o.form.blocks() * kParts; i < to * o.form.blocks() * kParts; ++i)
    o.rounded.offset[i] = 0;
}
void swapped(const Operands& o, std::int64_t from, std::int64_t to) {
  kPortable.words.round(o, from, to);
  std::swap(o.rounded.q[from * o.form.padded()], o.rounded.q[from * o.form.padded() + 16]);
}
void without_last_output(const Operands& o, std::int64_t from, std::int64_t to) {
  for (std::int64_t i = 0; i < o.rows * o.form.N; ++i) o.y[i] = 0;
  kPortable.words.multiply(o, from, to - 1);
}
void without_last_block(const Operands& o, std::int64_t from, std::int64_t to) {
  kPortable.words.round(o, from, to);
  o.rounded.step[to * o.form.blocks() - 1] = 0;
}
void without_byte_offset(const Operands& o, std::int64_t from, std::int64_t to) {
  kPortable.bytes.round(o, from, to);
  o.bytes.offset[to * RoundedBytes::sums(o.form) * kByteParts - 9] = 0;
}
void with_halves_swapped(const Operands& o, std::int64_t from, std::int64_t to) {
  kPortable.bytes.round(o, from, to);
  std::int8_t* q = o.bytes.q + from * RoundedBytes::padded(o.form);
  std::swap_ranges(q, q + kByteGroup / 2, q + kByteGroup / 2);
}
void with_too_large_sums(const Operands& o, std::int64_t from, std::int64_t to) {
  kPortable.bytes.multiply(o, from, to);
  if (o.form.block == 256) o.y[from] = 0;
}
void without_last_byte_row(const Operands& o, std::int64_t from, std::int64_t to) {
  kPortable.bytes.multiply(o, from, to);
  if (o.rows > 1) o.y[o.rows * o.form.N - 1] = 0;
}

void without_last_key(const Attended& a) {
  Attended less = a;
  if (less.count > 1) --less.count;
  kPortable.attend(less);
}
void without_maximum(const Attended& a) {  // overflows where scores are large
  kPortable.attend(a);
  if (a.found.most[0] > 88.0F) a.found.out[0] = std::numeric_limits<float>::quiet_NaN();
}
void without_last_query(const Attended& a) {
  kPortable.attend(a);
  if (a.queries > 1) std::fill_n(a.found.out + (a.queries - 1) * a.D, a.D, 0.0F);
}
void with_other_maximum(const Attended& a) {
  kPortable.attend(a);
  a.found.most[a.queries - 1] = a.found.most[0];
}
void with_padding(const Attended& a) {  // weights of keys that are not there
  kPortable.attend(a);
  if (a.count % 8 != 0) a.found.sum[a.queries - 1] *= 1.001F;
}

void without_epsilon(const Normalised& n) {
  Normalised less = n;
  less.epsilon = 0;
  kPortable.normalise(less);
}
void without_sum(const Normalised& n) {
  kPortable.normalise(n);
  std::copy_n(n.x, n.K, n.sum);
}
void as_silu(const Gated& g) {
  Gated other = g;
  other.activation = Activation::kSilu;
  kPortable.gate(other);
}
void without_last_value(const Gated& g) {
  kPortable.gate(g);
  g.y[g.count - 1] = 0;
}

Kernel with(const char* name, void (*change)(Kernel&)) {
  Kernel kernel = kPortable;
  kernel.name = name;
  change(kernel);
  return kernel;
}

void check_faults_are_found() {
  expect(find_fault(find_kernel()).empty(), "the fast form passes");
  expect(find_fault(kPortable).empty(), "the plain form passes");
  const Kernel broken[] = {
      with("offset", [](Kernel& k) { k.words.round = without_offset; }),
      with("order", [](Kernel& k) { k.words.round = swapped; }),
      with("output", [](Kernel& k) { k.words.multiply = without_last_output; }),
      with("block", [](Kernel& k) { k.words.round = without_last_block; }),
      with("byte offset", [](Kernel& k) { k.bytes.round = without_byte_offset; }),
      with("halves", [](Kernel& k) { k.bytes.round = with_halves_swapped; }),
      with("blocks of 256", [](Kernel& k) { k.bytes.multiply = with_too_large_sums; }),
      with("last row", [](Kernel& k) { k.bytes.multiply = without_last_byte_row; }),
      with("last key", [](Kernel& k) { k.attend = without_last_key; }),
      with("maximum", [](Kernel& k) { k.attend = without_maximum; }),
      with("last query", [](Kernel& k) { k.attend = without_last_query; }),
      with("other maximum", [](Kernel& k) { k.attend = with_other_maximum; }),
      with("padding", [](Kernel& k) { k.attend = with_padding; }),
      with("epsilon", [](Kernel& k) { k.normalise = without_epsilon; }),
      with("sum", [](Kernel& k) { k.normalise = without_sum; }),
      with("activation", [](Kernel& k) { k.gate = as_silu; }),
      with("last value", [](Kernel& k) { k.gate = without_last_value; })};
  for (const Kernel& kernel : broken) expect(!find_fault(kernel).empty(), kernel.name);
}

}  // namespace

int main() {
  check_values();
  check_rows_alone();
  check_values_that_are_none();
  check_attention();
  check_attention_to_none();
  check_around();
  check_faults_are_found();
  if (failures == 0) std::printf("%s: all checks passed\n", find_kernel().name);
  return failures == 0 ? 0 : 1;
}
