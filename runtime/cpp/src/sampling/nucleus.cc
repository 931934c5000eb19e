// SAMPLING.md removes a token if the mass of it and of all that stand lower is ≤ (1 - p) · S, sums
// in ascending order. Here
//
//     ids from a cut up ─► masses in float64, by buckets of s ─┐
//     all others ─────────► their sum, rough or in float32 ────┴─► the bucket where the sum passes
//                                                                  (1 - p) · S ─► sorted: the border
//
// Each sum is within a bound of what the stated order gives. Where the border is nearer to
// (1 - p) · S than that, the sum is taken in float32, then the cut is lowered, and at last nothing is
// decided.
#include "sampling/nucleus.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "sampling/largest.h"

namespace headport::internal {
namespace {

// Temperatures whose inverse float32 holds with room to spare.
constexpr double kColdest = 1e-3, kHottest = 1e3;
constexpr double kCuts[] = {-8.0, -13.0, -45.0};  // of s; below the last all masses are nothing
constexpr std::size_t kBuckets = 512;
// Relative errors: of a sum of float32 masses between the last cut and 0, and of float64 ones; of a
// rough sum, which is from 1 to 1.0615 times the true one and is put between the two.
constexpr double kSingle = 1.2e-5, kDouble = 1e-10;
constexpr double kMiddle = 0.97103, kRough = 0.0305;
constexpr double kNothing = 1e-15;  // the share of S that all ids below the last cut can have

// Four at a time, which compilers do not find by themselves here.
using Floats = float __attribute__((vector_size(16)));
using Ints = std::int32_t __attribute__((vector_size(16)));
constexpr std::size_t kLanes = 4;

// The same bits as another type.
template <typename To, typename From>
inline To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline Floats all(float value) { return Floats{value, value, value, value}; }

// 2^x within 4e-7 of it, for x up to 0; from -126 down that of -126. x = n + f with |f| ≤ 1/2; the
// polynomial is the series of exp(f ln 2), and n is added to the exponent.
inline Floats power_of_2(Floats x) {
  x = x < all(-126.0f) ? all(-126.0f) : x;
  const Floats round = all(12582912.0f);  // 1.5 · 2^23: adding it rounds to whole numbers
  const Floats shifted = x + round;
  const Floats f = x - (shifted - round);
  Floats sum = all(1.54035304e-4f);
  for (const float term : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f,
                           6.93147181e-1f, 1.0f}) {
    sum = sum * f + all(term);
  }
  // The low bits of `shifted` are n; what is above them falls out at the top.
  return bits_of<Floats>(bits_of<Ints>(sum) + (bits_of<Ints>(shifted) << 23));
}

// At least 2^x and at most 1.0615 · 2^x, for x up to 0: the mantissa's bits in place of a power.
inline Floats at_least_power_of_2(Floats x) {
  const Floats bits = (x + all(127.0f)) * all(8388608.0f);  // 2^23
  return bits_of<Floats>(__builtin_convertvector(bits > all(0.0f) ? bits : all(0.0f), Ints));
}

// Four differences to the largest score, and which of the scores are below the cut.
inline void take(const float* scores, float top, float cut, Floats& below_top, Ints& chosen) {
  Floats found;
  std::memcpy(&found, scores, sizeof found);
  below_top = found - all(top);
  chosen = found < all(cut);
}

inline void take(const double* scores, double top, double cut, Floats& below_top, Ints& chosen) {
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    below_top[lane] = static_cast<float>(scores[lane] - top);
    chosen[lane] = scores[lane] < cut ? -1 : 0;
  }
}

// Σ power(s) over the scores below `cut`.
template <typename T, typename Power>
double mass_below(const T* scores, std::size_t size, T top, T cut, float inverse, Power power) {
  constexpr std::size_t kRun = 64;  // sums in float32 are this long
  double total = 0.0;
  Floats below_top = all(0.0f);
  Ints chosen = {};
  const auto add = [&](const T* four, Floats& sum) {
    take(four, top, cut, below_top, chosen);
    sum += bits_of<Floats>(bits_of<Ints>(power(below_top * all(inverse))) & chosen);
  };
  std::size_t n = 0;
  while (n + kLanes <= size) {
    Floats sum = all(0.0f);
    const std::size_t end = std::min(size - size % kLanes, n + kRun * kLanes);
    for (; n < end; n += kLanes) add(scores + n, sum);
    for (std::size_t lane = 0; lane < kLanes; ++lane) total += static_cast<double>(sum[lane]);
  }
  if (n == size) return total;
  T rest[kLanes] = {top, top, top, top};  // the largest is not below the cut
  std::copy(scores + n, scores + size, rest);
  Floats sum = all(0.0f);
  add(rest, sum);
  for (std::size_t lane = 0; lane < kLanes; ++lane) total += static_cast<double>(sum[lane]);
  return total;
}

// The ids from a cut up and their masses.
class Upper {
 public:
  Upper(Scores& kept, double largest, double temperature, double cut)
      : kept_(kept), largest_(largest) {
    const double inverse = 1.0 / temperature;
    const double scale = static_cast<double>(kBuckets) / -cut;
    kept_.log_p.clear();
    kept_.buckets.clear();
    for (const double value : kept_.values) {
      const double s = (value - largest) * inverse;
      const double mass = std::exp(s);
      const double place = std::max(0.0, (s - cut) * scale);
      const auto bucket = std::min(kBuckets - 1, static_cast<std::size_t>(place));
      kept_.log_p.push_back(mass);
      kept_.buckets.push_back(static_cast<std::uint16_t>(bucket));
      masses_[bucket] += mass;
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
      if (kept_.buckets[n] == border) order.push_back(n);
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
  double largest_;
  double masses_[kBuckets] = {};
  double total_ = 0.0;
};

}  // namespace

template <typename T>
bool nucleus(const T* scores, std::size_t size, const Columns& columns, double temperature, double p,
             Scores& kept) {
  if (!(temperature >= kColdest && temperature <= kHottest)) return false;
  largest_of_runs(scores, size, kept.runs);
  const double best = *std::max_element(kept.runs.begin(), kept.runs.end());
  const T top = static_cast<T>(best);
  const auto inverse = static_cast<float>(1.4426950408889634 / temperature);
  for (const double each : kCuts) {
    // Rounded to the type of the scores, and the buckets follow it.
    const T cut = static_cast<T>(best + each * temperature);
    const double lowest = scaled(static_cast<double>(cut), best, temperature);
    const bool last = each == kCuts[2];
    kept.clear();
    for_each_from(scores, size, kept.runs, last ? std::numeric_limits<T>::lowest() : cut,
                  [&](std::size_t n) { kept.add(static_cast<double>(scores[n]), columns.id(n)); });
    Upper upper(kept, best, temperature, std::min(lowest, -1e-3));
    const auto keep = [&](double below, double relative) {
      const double total = upper.total() + below;
      const double error = below * relative + total * (kDouble + kNothing);
      return upper.keep(below, (1.0 - p) * total, error * 2.0);
    };
    const auto mass = [&](auto power) { return mass_below(scores, size, top, cut, inverse, power); };
    if (last) return keep(0.0, 0.0);
    if (keep(kMiddle * mass([](Floats x) { return at_least_power_of_2(x); }), kRough)) return true;
    if (keep(mass([](Floats x) { return power_of_2(x); }), kSingle)) return true;
  }
  return false;
}

template bool nucleus(const float*, std::size_t, const Columns&, double, double, Scores&);
template bool nucleus(const double*, std::size_t, const Columns&, double, double, Scores&);

}  // namespace headport::internal
