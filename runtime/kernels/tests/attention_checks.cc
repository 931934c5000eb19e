// Attention: the plain form and the fast one against float64.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention_parts.h"
#include "checks.h"
#include "product.h"

namespace {

using namespace headport::kernels;

// Queries against keys and values in chunks, as the operator does it.
struct AttentionCase {
  std::int64_t queries, count, D;
  std::vector<float> query, keys, values;

  AttentionCase(std::int64_t asked, std::int64_t among, std::int64_t size, float steep)
      : queries(asked), count(among), D(size) {
    const std::vector<float> from = random_values((2 * count + queries) * D);
    const float* next = from.data();
    keys.assign(next, next + count * D);
    values.assign(next + count * D, next + 2 * count * D);
    query.assign(next + 2 * count * D, next + 2 * count * D + queries * D);
    for (float& value : query) value *= steep;
  }

  std::vector<float> run(const Kernel& kernel, std::int64_t first_query, std::int64_t some) const {
    std::vector<float> made(static_cast<std::size_t>(2 * some * (D + 2)));
    const auto weighed = [&](float* begin) {
      return Partial{begin + some * D, begin + some * D + some, begin};
    };
    const Partial found = weighed(made.data());
    const Partial next = weighed(made.data() + some * (D + 2));
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
void check_values() {
  for (const std::int64_t queries : {1, 2, 3, 4, 5, 7, 8})
    for (const std::int64_t D : {8, 20, 64, 96})
      for (const std::int64_t count : {1, 7, 8, 127, 128, 129, 300})
        for (const float steep : {0.5F, 30.0F})
          for (const Kernel* kernel : {&kPortable, &find_kernel()}) {
            AttentionCase asked(queries, count, D, steep);
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
      AttentionCase asked(3, count, 64, 1.0F);
      for (std::int64_t q = 0; q < 3; ++q) asked.query[static_cast<std::size_t>(q * 64)] = 1.0F;
      const auto runs = [&](std::int64_t from, std::int64_t to, float key) {
        AttentionCase changed = asked;
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
      AttentionCase rest(3, count, 64, 1.0F);
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

}  // namespace

void check_attention() {
  check_values();
  check_attention_to_none();
}
