// The self-test passes the kernels, and finds what could be wrong with one.
#include <algorithm>
#include <limits>

#include "checks.h"
#include "product.h"
#include "selftest.h"

namespace {

using namespace headport::kernels;

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
void without_large_blocks(const Operands& o, std::int64_t from, std::int64_t to) {
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

std::int64_t that_skips_one(const Keys& keys, std::int64_t from, std::int64_t to, float threshold) {
  return kPortable.ranking.next_above(keys, std::min(from + 1, to), to, threshold);
}
std::int64_t that_ends_early(const Keys& keys, std::int64_t from, std::int64_t to, float threshold) {
  const std::int64_t end = to / 8 * 8;  // what fills no register is left out
  const std::int64_t found = kPortable.ranking.next_above(keys, from, std::max(from, end), threshold);
  return found < end ? found : to;
}
std::int64_t without_noise(const Keys& keys, std::int64_t from, std::int64_t to, float threshold) {
  const float none = 0;
  return kPortable.ranking.next_above({keys.upper, &none, 0}, from, to, threshold);
}
float without_last_term(const float* values, std::int64_t count, float shift) {
  return kPortable.ranking.exp_sum(values, count - 1, shift);
}
double in_float32(const float* weight, const double* x, std::int64_t count) {
  return static_cast<float>(kPortable.ranking.dot(weight, x, count));
}

Kernel with(const char* name, void (*change)(Kernel&)) {
  Kernel kernel = kPortable;
  kernel.name = name;
  change(kernel);
  return kernel;
}

}  // namespace

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
      with("blocks of 256", [](Kernel& k) { k.bytes.multiply = without_large_blocks; }),
      with("last row", [](Kernel& k) { k.bytes.multiply = without_last_byte_row; }),
      with("last key", [](Kernel& k) { k.attend = without_last_key; }),
      with("maximum", [](Kernel& k) { k.attend = without_maximum; }),
      with("last query", [](Kernel& k) { k.attend = without_last_query; }),
      with("other maximum", [](Kernel& k) { k.attend = with_other_maximum; }),
      with("padding", [](Kernel& k) { k.attend = with_padding; }),
      with("epsilon", [](Kernel& k) { k.normalise = without_epsilon; }),
      with("sum", [](Kernel& k) { k.normalise = without_sum; }),
      with("activation", [](Kernel& k) { k.gate = as_silu; }),
      with("last value", [](Kernel& k) { k.gate = without_last_value; }),
      with("skipped token", [](Kernel& k) { k.ranking.next_above = that_skips_one; }),
      with("last tokens", [](Kernel& k) { k.ranking.next_above = that_ends_early; }),
      with("noise", [](Kernel& k) { k.ranking.next_above = without_noise; }),
      with("last term", [](Kernel& k) { k.ranking.exp_sum = without_last_term; }),
      with("float32", [](Kernel& k) { k.ranking.dot = in_float32; })};
  for (const Kernel& kernel : broken) expect(!find_fault(kernel).empty(), kernel.name);
}
