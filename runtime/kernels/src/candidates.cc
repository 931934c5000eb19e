#include "candidates.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace headport::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLargestNorm = 0x1p60;  // LARGEST_NORM of headport/certificate.py
constexpr std::int64_t kSummed = 4096;   // float32 terms that are added up before float64 takes over

struct Key {
  float value;  // infinite where it is NaN, so that the token is looked at
  std::int64_t id;

  bool operator<(const Key& other) const {  // is better
    return value > other.value || (value == other.value && id < other.id);
  }
};

Key key_of(const Keys& keys, std::int64_t id) {
  const float value = keys.at(id);
  return {std::isnan(value) ? std::numeric_limits<float>::infinity() : value, id};
}

// The best `count` tokens, best first.
void find_best(const Keys& keys, std::int64_t V, std::int64_t count, const Kernel& kernel,
               std::vector<Key>& best) {
  best.clear();
  for (std::int64_t id = 0; id < count; ++id) best.push_back(key_of(keys, id));
  std::make_heap(best.begin(), best.end());  // the worst of them in front
  for (std::int64_t id = count; (id = kernel.ranking.next_above(keys, id, V, best[0].value)) < V;
       ++id) {
    const Key key = key_of(keys, id);
    if (!(key < best[0])) continue;
    std::pop_heap(best.begin(), best.end());
    best.back() = key;
    std::push_heap(best.begin(), best.end());
  }
  std::sort_heap(best.begin(), best.end());
}

struct Scored {
  double z;
  std::int64_t id;

  bool operator<(const Scored& other) const {  // comes first; NaN before all
    const bool mine = std::isnan(z);
    const bool others = std::isnan(other.z);
    if (mine || others) return mine && (!others || id < other.id);
    return z > other.z || (z == other.z && id < other.id);
  }
};

// work(from, to) for what lies between the ids, which ascend, up to V.
template <typename Work>
void for_others(const std::vector<std::int64_t>& ids, std::int64_t V, Work&& work) {
  std::int64_t from = 0;
  for (const std::int64_t id : ids) {
    if (from < id) work(from, id);
    from = id + 1;
  }
  if (from < V) work(from, V);
}

double mapped(double z, const Terms& terms) {
  z *= terms.scale;
  return terms.softcap == 0 ? z : std::tanh(z / terms.softcap) * terms.softcap;
}

// For each thread, kept from row to row.
struct Room {
  std::vector<double> x;
  std::vector<Key> best;
  std::vector<Scored> scored;
  std::vector<std::int64_t> ascending;
};

}  // namespace

void Candidates::run(const Kernel& kernel) const {
  thread_local Room room;
  room.x.assign(x, x + H);
  double squares = 0;
  for (const double each : room.x) squares += each * each;
  const double norm = std::sqrt(squares);
  *error = norm * terms.error_slope + terms.error_rest;

  auto& [wide, best, scored, ascending] = room;
  find_best(keys, V, count + 1, kernel, best);
  scored.clear();
  ascending.clear();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t id = best[static_cast<std::size_t>(i)].id;
    const double z = kernel.ranking.dot(weight + id * H, wide.data(), H);
    scored.push_back({mapped(bias == nullptr ? z : z + bias[id], terms), id});
    ascending.push_back(id);
  }
  std::sort(ascending.begin(), ascending.end());
  std::sort(scored.begin(), scored.end());
  for (std::int64_t i = 0; i < count; ++i) {
    ids[i] = scored[static_cast<std::size_t>(i)].id;
    candidate_logits[i] = scored[static_cast<std::size_t>(i)].z;
  }

  *cut = certified && norm < kLargestNorm ? double{best.back().value} : kInfinity;
  std::int64_t proved = 0;
  for (; certified && proved < count; ++proved) {
    const double z = candidate_logits[proved];
    if (!(z - *error > *cut)) break;
    if (proved + 1 == count) continue;  // nothing comes behind the last one
    const bool equal = firsts != nullptr && firsts[ids[proved]] == firsts[ids[proved + 1]];
    if (!equal && !(z - candidate_logits[proved + 1] > 2 * *error)) break;
  }
  *certified_k = proved;

  // Candidates enter with their exact logits, all others with quantised ones.
  double largest = candidate_logits[0];
  for_others(ascending, V, [&](std::int64_t from, std::int64_t to) {
    largest = std::max(largest, double{kernel.ranking.largest(logits + from, to - from)});
  });
  auto shift = static_cast<float>(largest);
  if (double{shift} < largest) shift = std::nextafter(shift, std::numeric_limits<float>::infinity());
  double mass = 0;
  for (std::int64_t i = 0; i < count; ++i) mass += std::exp(candidate_logits[i] - double{shift});
  for_others(ascending, V, [&](std::int64_t from, std::int64_t to) {
    for (; from < to; from += kSummed)
      mass += double{kernel.ranking.exp_sum(logits + from, std::min(kSummed, to - from), shift)};
  });
  *logsumexp = std::log(mass) + double{shift};
}

}  // namespace headport::kernels
