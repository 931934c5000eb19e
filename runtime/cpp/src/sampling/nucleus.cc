// SAMPLING.md removes a token if the mass of it and of all that stand lower is ≤ (1 - p) · S, sums
// in ascending order. Here
//
//     ids from a cut up ─► masses in float64, by buckets of s ─┐
//     all others ─────────► their sum in float32 ──────────────┴─► the bucket where the sum passes
//                                                                  (1 - p) · S ─► sorted: the border
//
// Each sum is within a bound of what the stated order gives. Where the border is nearer to
// (1 - p) · S than that, the cut is lowered, and at last nothing is decided.
#include "sampling/nucleus.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "sampling/largest.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HEADPORT_AVX2 __attribute__((target("avx2")))
#endif

namespace headport::internal {
namespace {

// Temperatures whose inverse float32 holds with room to spare.
constexpr double kColdest = 1e-3, kHottest = 1e3;
constexpr double kCuts[] = {-8.0, -13.0, -45.0};  // of s; below the last all masses are nothing
constexpr std::size_t kBuckets = 512;
// Relative errors: of a sum of float32 masses between the last cut and 0; of float64 ones.
constexpr double kSingle = 1.2e-5, kDouble = 1e-10;
constexpr double kNothing = 1e-15;  // the share of S that all ids below the last cut can have

// exp(x ln 2) for x from -126 to 0, within 4e-7 of it. x = n + f with |f| ≤ 1/2; the polynomial is
// the series of exp(f ln 2), and n is added to the exponent.
inline __attribute__((always_inline)) float power_of_2(float x) {
  x = x < -126.0f ? -126.0f : x;
  constexpr float kRound = 12582912.0f;  // 1.5 · 2^23: adding it rounds to whole numbers
  const float shifted = x + kRound;
  const float f = x - (shifted - kRound);
  float sum = 1.54035304e-4f;
  sum = sum * f + 1.33335581e-3f;
  sum = sum * f + 9.61812911e-3f;
  sum = sum * f + 5.55041087e-2f;
  sum = sum * f + 2.40226507e-1f;
  sum = sum * f + 6.93147181e-1f;
  sum = sum * f + 1.0f;
  std::int32_t bits = 0, whole = 0;
  std::memcpy(&bits, &sum, sizeof bits);
  std::memcpy(&whole, &shifted, sizeof whole);
  // The low bits of `shifted` are n; what is above them falls out at the top.
  bits = static_cast<std::int32_t>(static_cast<std::uint32_t>(bits) +
                                   (static_cast<std::uint32_t>(whole) << 23));
  float found = 0.0f;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

// Σ exp(s) over the scores below `cut`.
template <typename T>
inline __attribute__((always_inline)) double mass_below(const T* scores, std::size_t size, T top,
                                                        T cut, float inverse) {
  constexpr std::size_t kLanes = 16, kRun = 256;
  double total = 0.0;
  std::size_t n = 0;
  while (n + kLanes <= size) {
    float lanes[kLanes] = {};
    const std::size_t end = std::min(size - size % kLanes, n + kRun);
    for (; n < end; n += kLanes) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        const T score = scores[n + lane];
        const float mass = power_of_2(static_cast<float>(score - top) * inverse);
        lanes[lane] += score < cut ? mass : 0.0f;
      }
    }
    for (const float lane : lanes) total += static_cast<double>(lane);
  }
  for (; n < size; ++n) {
    const float mass = power_of_2(static_cast<float>(scores[n] - top) * inverse);
    total += scores[n] < cut ? static_cast<double>(mass) : 0.0;
  }
  return total;
}

template <typename T>
double mass_below_plain(const T* scores, std::size_t size, T top, T cut, float inverse) {
  return mass_below(scores, size, top, cut, inverse);
}

#if defined(HEADPORT_AVX2)
template <typename T>
HEADPORT_AVX2 double mass_below_wide(const T* scores, std::size_t size, T top, T cut,
                                     float inverse) {
  return mass_below(scores, size, top, cut, inverse);
}
#endif

template <typename T>
double mass_below_cut(const T* scores, std::size_t size, T top, T cut, float inverse) {
#if defined(HEADPORT_AVX2)
  if (__builtin_cpu_supports("avx2")) return mass_below_wide(scores, size, top, cut, inverse);
#endif
  return mass_below_plain(scores, size, top, cut, inverse);
}

// The ids from a cut up and their masses.
class Upper {
 public:
  Upper(Scores& kept, double largest, double temperature, double cut)
      : kept_(kept), largest_(largest), temperature_(temperature), cut_(cut) {
    kept_.log_p.clear();
    for (const double value : kept_.values) {
      const double s = scaled(value, largest, temperature);
      const double mass = std::exp(s);
      kept_.log_p.push_back(mass);
      masses_[bucket_of(s)] += mass;
      total_ += mass;
    }
  }

  double total() const { return total_; }

  // Leaves what top-p keeps, where `below` is the mass of all other ids; false where that is too
  // near. `error` is of any sum.
  bool keep(double below, double limit, double error) {
    double sum = below;
    std::size_t border = 0;
    // Above the last bucket nothing is removed: the largest score always stays.
    while (border + 1 < kBuckets && sum + masses_[border] <= limit) sum += masses_[border++];
    std::vector<std::size_t>& order = kept_.order;
    order.clear();
    for (std::size_t n = 0; n < kept_.size(); ++n) {
      if (bucket_of(scaled(kept_.values[n], largest_, temperature_)) == border) order.push_back(n);
    }
    // Of equal scores the higher id stands lower.
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return kept_.values[a] != kept_.values[b] ? kept_.values[a] < kept_.values[b] : a > b;
    });
    if (sum > 0.0 && !(sum <= limit - error)) return false;
    for (const std::size_t n : order) {
      const double next = sum + kept_.log_p[n];
      if (next <= limit - error) {
        sum = next;
        continue;
      }
      if (next < limit + error && !is_last(n)) return false;
      leave(kept_.values[n], n);
      return true;
    }
    return false;
  }

 private:
  std::size_t bucket_of(double s) const {
    const double place = (s - cut_) * (static_cast<double>(kBuckets) / -cut_);
    if (!(place > 0.0)) return 0;
    return std::min(kBuckets - 1, static_cast<std::size_t>(place));
  }

  // Whether nothing stands above: it is the first of the largest.
  bool is_last(std::size_t place) const {
    if (kept_.values[place] < largest_) return false;
    return std::find(kept_.values.begin(), kept_.values.end(), largest_) -
               kept_.values.begin() == static_cast<std::ptrdiff_t>(place);
  }

  // Leaves a score, those above it, and of its equals those with lower ids.
  void leave(double least, std::size_t last) {
    std::size_t count = 0;
    for (std::size_t n = 0; n < kept_.size(); ++n) {
      const double value = kept_.values[n];
      if (value < least || (value == least && n > last)) continue;
      kept_.values[count] = value;
      kept_.ids[count] = kept_.ids[n];
      ++count;
    }
    kept_.values.resize(count);
    kept_.ids.resize(count);
  }

  Scores& kept_;
  double largest_, temperature_, cut_;
  double masses_[kBuckets] = {};
  double total_ = 0.0;
};

}  // namespace

template <typename T>
bool nucleus(const T* scores, std::size_t size, const Columns& columns, double temperature, double p,
             Scores& kept) {
  if (!(temperature >= kColdest && temperature <= kHottest)) return false;
  const T top = largest(scores, size);
  const double best = static_cast<double>(top);
  const auto inverse = static_cast<float>(1.4426950408889634 / temperature);
  for (const double each : kCuts) {
    // Rounded to the type of the scores, and the buckets follow it.
    const T cut = static_cast<T>(best + each * temperature);
    const double lowest = scaled(static_cast<double>(cut), best, temperature);
    const bool all = each == kCuts[2];
    const double below = all ? 0.0 : mass_below_cut(scores, size, top, cut, inverse);
    kept.clear();
    for_each_from(scores, size, all ? std::numeric_limits<T>::lowest() : cut, [&](std::size_t n) {
      kept.add(static_cast<double>(scores[n]), columns.id(n));
    });
    Upper upper(kept, best, temperature, std::min(lowest, -1e-3));
    const double total = upper.total() + below;
    const double error = below * kSingle + total * (kDouble + kNothing);
    if (upper.keep(below, (1.0 - p) * total, error * 2.0)) return true;
  }
  return false;
}

template bool nucleus(const float*, std::size_t, const Columns&, double, double, Scores&);
template bool nucleus(const double*, std::size_t, const Columns&, double, double, Scores&);

}  // namespace headport::internal
