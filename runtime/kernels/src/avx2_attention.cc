// Compiled for AVX2 and FMA; called only where the CPU has both.
//
// What a query gives does not depend on the queries beside it, nor on how many keys are scored at
// once.
#if defined(__x86_64__)
#include "avx2.h"

#include <algorithm>
#include <limits>

namespace headport::kernels {
namespace {

constexpr int kLanes = 8;
constexpr int kQueries = 3;  // at once: with four keys or registers of values, all registers
constexpr int kLine = 16;    // floats of a cache line

using Scores = float[kQueries][kMostKeys];

__m128 four_sums(const __m256* of) {
  const __m256 all =
      _mm256_hadd_ps(_mm256_hadd_ps(of[0], of[1]), _mm256_hadd_ps(of[2], of[3]));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

// Scores of keys from j on. Values are read when all keys are scored, each row in parts, which
// hardware does not foresee; so they are fetched here, while memory waits for sums.
template <int Queries, int Keys>
void score_tile(const Attended& a, std::int64_t j, Scores& scores) {
  const float* keys = a.keys + j * a.D;
  const float* values = a.values + j * a.D;
  __m256 sum[Queries][Keys];
  for (auto& of_query : sum)
    for (__m256& one : of_query) one = _mm256_setzero_ps();
  for (std::int64_t i = 0; i < a.D; i += kLanes) {
    __m256 query[Queries];
    for (int q = 0; q < Queries; ++q) query[q] = _mm256_loadu_ps(a.query + q * a.D + i);
    for (int k = 0; k < Keys * kLanes; k += kLine)
      _mm_prefetch(reinterpret_cast<const char*>(values + i * Keys + k), _MM_HINT_T0);
    for (int k = 0; k < Keys; ++k) {
      const __m256 key = _mm256_loadu_ps(keys + k * a.D + i);
      for (int q = 0; q < Queries; ++q) sum[q][k] = _mm256_fmadd_ps(query[q], key, sum[q][k]);
    }
  }
  for (int q = 0; q < Queries; ++q) {
    if constexpr (Keys == 1) {
      const __m256 same[] = {sum[q][0], sum[q][0], sum[q][0], sum[q][0]};
      scores[q][j] = _mm_cvtss_f32(four_sums(same));
    } else {
      for (int k = 0; k < Keys; k += 4) _mm_store_ps(scores[q] + j + k, four_sums(sum[q] + k));
    }
  }
}

template <int Queries>
void score(const Attended& a, Scores& scores) {
  constexpr int kKeys = Queries == 1 ? 8 : 4;  // sums enough to hide how long each addition takes
  std::int64_t j = 0;
  for (; j + kKeys <= a.count; j += kKeys) score_tile<Queries, kKeys>(a, j, scores);
  for (; j < a.count; ++j) score_tile<Queries, 1>(a, j, scores);
}

// Scores become weights. What is 87 below the largest weighs nothing.
void weigh(float* scores, std::int64_t count, float* most, float* sum) {
  const std::int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  std::fill(scores + count, scores + padded, -std::numeric_limits<float>::infinity());
  __m256 largest = _mm256_set1_ps(std::numeric_limits<float>::lowest());
  for (std::int64_t j = 0; j < padded; j += kLanes)
    largest = _mm256_max_ps(largest, _mm256_load_ps(scores + j));
  alignas(32) float lanes[kLanes];
  _mm256_store_ps(lanes, largest);
  *most = *std::max_element(lanes, lanes + kLanes);
  __m256 total = _mm256_setzero_ps();
  for (std::int64_t j = 0; j < padded; j += kLanes) {
    const __m256 below = _mm256_sub_ps(_mm256_load_ps(scores + j), _mm256_set1_ps(*most));
    const __m256 counts = _mm256_cmp_ps(below, _mm256_set1_ps(-87.0F), _CMP_NLT_UQ);  // NaN too
    const __m256 weight = _mm256_and_ps(exp_of(below), counts);
    _mm256_store_ps(scores + j, weight);
    total = _mm256_add_ps(total, weight);
  }
  *sum = sum_of(total);
}

template <int Queries, int Registers>
void gather_tile(const Attended& a, const Scores& weights, std::int64_t from) {
  __m256 sum[Queries][Registers];
  for (auto& of_query : sum)
    for (__m256& one : of_query) one = _mm256_setzero_ps();
  for (std::int64_t j = 0; j < a.count; ++j) {
    __m256 weight[Queries];
    for (int q = 0; q < Queries; ++q) weight[q] = _mm256_broadcast_ss(weights[q] + j);
    for (int i = 0; i < Registers; ++i) {
      const __m256 value = _mm256_loadu_ps(a.values + j * a.D + from + i * kLanes);
      for (int q = 0; q < Queries; ++q) sum[q][i] = _mm256_fmadd_ps(weight[q], value, sum[q][i]);
    }
  }
  for (int q = 0; q < Queries; ++q)
    for (int i = 0; i < Registers; ++i)
      _mm256_storeu_ps(a.found.out + q * a.D + from + i * kLanes, sum[q][i]);
}

template <int Queries>
void attend(const Attended& a) {
  alignas(64) Scores scores;
  score<Queries>(a, scores);
  for (int q = 0; q < Queries; ++q) weigh(scores[q], a.count, a.found.most + q, a.found.sum + q);
  constexpr int kWide = Queries == 1 ? 8 : 4;
  std::int64_t from = 0;
  for (; from + kWide * kLanes <= a.D; from += kWide * kLanes)
    gather_tile<Queries, kWide>(a, scores, from);
  for (; from < a.D; from += kLanes) gather_tile<Queries, 1>(a, scores, from);
}

constexpr void (*kTiles[kQueries])(const Attended&) = {attend<1>, attend<2>, attend<3>};

}  // namespace

void attend_avx2(const Attended& a) {
  if (a.D % kLanes != 0) return kPortable.attend(a);
  for (std::int64_t q = 0; q < a.queries; q += kQueries) {
    Attended tile = a;
    tile.queries = std::min<std::int64_t>(kQueries, a.queries - q);
    tile.query += q * a.D;
    tile.found = {a.found.most + q, a.found.sum + q, a.found.out + q * a.D};
    kTiles[tile.queries - 1](tile);
  }
}

}  // namespace headport::kernels
#endif
