#include "selftest.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "matmul_call.h"

namespace headport::kernels {
namespace {

constexpr std::int64_t kOutputs = 3;
constexpr std::int64_t kRows = 10;  // six, three and one at once
constexpr float kAccepted = 1e-5F;  // of the largest: sums of float32 in another order
constexpr std::int64_t kBeyond = 4096;  // bytes behind a weight that a kernel may fetch ahead

struct Random {
  std::uint32_t state = 1;
  std::uint32_t next() { return state = state * 1664525U + 1013904223U; }
  float real() { return static_cast<float>(next() >> 8) / 8388608.0F - 1.0F; }
};

std::vector<float> run(const Kernel& kernel, const Form& form, std::int64_t rows, bool wild) {
  Random random;
  std::vector<float> x(static_cast<std::size_t>(rows * form.K));
  for (float& value : x) value = random.real();
  if (wild) x[0] = 1e4F;
  std::vector<std::uint8_t> weight(static_cast<std::size_t>(form.N * form.row_bytes() + kBeyond));
  for (std::uint8_t& byte : weight) byte = static_cast<std::uint8_t>(random.next() >> 24);
  std::vector<float> scale(static_cast<std::size_t>(form.N * form.blocks()));
  for (float& value : scale) value = random.real();
  std::vector<float> y(static_cast<std::size_t>(rows * form.N));
  Operands operands{form, x.data(), rows, weight.data(), scale.data(), {}, {}, y.data()};
  Buffers buffers;
  buffers.round_into(operands);
  kernel.product(form).round(operands, 0, rows);
  kernel.product(form).multiply(operands, 0, form.N);
  return y;
}

// The numbers of one Partial: each is compared with its like.
struct Attention {
  std::vector<float> most, sum, out;
};

Attention run_attention(const Kernel& kernel, std::int64_t queries, std::int64_t count,
                        std::int64_t D, float size) {
  Random random;
  std::vector<float> query(static_cast<std::size_t>(queries * D));
  std::vector<float> keys(static_cast<std::size_t>(count * D));
  std::vector<float> values(keys.size());
  for (float& value : query) value = size * random.real();
  for (float& value : keys) value = random.real();
  for (float& value : values) value = random.real();
  Attention made;
  made.most.resize(static_cast<std::size_t>(queries));
  made.sum.resize(made.most.size());
  made.out.resize(query.size());
  kernel.attend({query.data(), queries, keys.data(), values.data(), count, D,
                 {made.most.data(), made.sum.data(), made.out.data()}});
  return made;
}

bool agree(const std::vector<float>& found, const std::vector<float>& expected) {
  float most = 0.0F;
  float apart = 0.0F;
  for (std::size_t i = 0; i < found.size(); ++i) {
    most = std::max(most, std::fabs(expected[i]));
    apart = std::max(apart, std::fabs(found[i] - expected[i]));
    if (!std::isfinite(found[i])) return false;
  }
  return apart <= kAccepted * most;
}

struct Bits {
  int weight;
  int activation;
};
constexpr Bits kBits[] = {{4, 16}, {8, 16}, {4, 8}};

std::string find_product_fault(const Kernel& kernel) {
  for (const Bits bits : kBits)
    for (const std::int64_t block : {32, 64, 128, 256})
      for (const std::int64_t K : {2 * block, 3 * block - 24})
        for (const std::int64_t rows : {std::int64_t{1}, kRows}) {
          const Form form{kOutputs, K, block, bits.weight, bits.activation};
          for (const bool wild : {false, true})
            if (!agree(run(kernel, form, rows, wild), run(kPortable, form, rows, wild)))
              return std::string(kernel.name) + " differs from the plain form: " +
                     std::to_string(bits.weight) + " bits, activations of " +
                     std::to_string(bits.activation) + ", blocks of " + std::to_string(block) +
                     ", K = " + std::to_string(K) + ", " + std::to_string(rows) + " rows";
        }
  return {};
}

std::string find_attention_fault(const Kernel& kernel) {
  for (const std::int64_t queries : {1, 2, 3, 5})
    for (const std::int64_t D : {8, 12, 72})
      for (const std::int64_t count : {1, 3, 29, 64})
        for (const float size : {1.0F, 60.0F}) {  // the larger: scores whose exponentials overflow
          const Attention found = run_attention(kernel, queries, count, D, size);
          const Attention expected = run_attention(kPortable, queries, count, D, size);
          if (!agree(found.most, expected.most) || !agree(found.sum, expected.sum) ||
              !agree(found.out, expected.out))
            return std::string(kernel.name) + " differs from the plain form: attention of " +
                   std::to_string(queries) + " queries of " + std::to_string(D) + " to " +
                   std::to_string(count) + " keys";
        }
  return {};
}

std::vector<float> random_values(std::int64_t count, float size, Random& random) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = size * random.real();
  return values;
}

std::vector<float> run_norm(const Kernel& kernel, std::int64_t K, bool skips) {
  Random random;
  const std::vector<float> x = random_values(K, 3.0F, random);
  const std::vector<float> skip = random_values(K, 2.0F, random);
  const std::vector<float> gamma = random_values(K, 1.0F, random);
  std::vector<float> made(static_cast<std::size_t>(2 * K));
  // An epsilon that counts, so that one that is lost is seen.
  kernel.normalise({x.data(), skips ? skip.data() : nullptr, gamma.data(), 0.5F, K, made.data(),
                    made.data() + K});
  return made;
}

std::vector<float> run_gate(const Kernel& kernel, Activation activation, std::int64_t count,
                            float size) {
  Random random;
  const std::vector<float> gate = random_values(count, size, random);
  const std::vector<float> up = random_values(count, 1.0F, random);
  std::vector<float> y(static_cast<std::size_t>(count));
  kernel.gate({activation, gate.data(), up.data(), count, y.data()});
  return y;
}

std::string find_fault_around(const Kernel& kernel) {
  for (const std::int64_t K : {8, 20, 64})
    for (const bool skips : {false, true})
      if (!agree(run_norm(kernel, K, skips), run_norm(kPortable, K, skips)))
        return std::string(kernel.name) + " differs from the plain form: a norm of " +
               std::to_string(K);
  for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh})
    for (const std::int64_t count : {3, 8, 21})
      for (const float size : {4.0F, 200.0F})  // the larger: exponentials that overflow
        if (!agree(run_gate(kernel, activation, count, size),
                   run_gate(kPortable, activation, count, size)))
          return std::string(kernel.name) + " differs from the plain form: an activation of " +
                 std::to_string(count);
  return {};
}

}  // namespace

std::string find_fault(const Kernel& kernel) {
  for (const auto find : {find_product_fault, find_attention_fault, find_operator_fault,
                          find_candidates_fault, find_fault_around})
    if (std::string fault = find(kernel); !fault.empty()) return fault;
  return {};
}

}  // namespace headport::kernels
