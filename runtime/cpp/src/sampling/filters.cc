// Arithmetic is float64; sums run in the order that is stated, one by one, as in Python.
#include "sampling/filters.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "sampling/largest.h"

namespace headport::internal {
namespace {

// Leaves the positions for which a test holds.
template <typename Test>
void keep_if(Scores& scores, Test test) {
  std::size_t kept = 0;
  for (std::size_t n = 0; n < scores.size(); ++n) {
    if (!test(n)) continue;
    scores.values[kept] = scores.values[n];
    scores.ids[kept] = scores.ids[n];
    ++kept;
  }
  scores.values.resize(kept);
  scores.ids.resize(kept);
}

// Every score not below the k-th largest, so ties at the k-th place all stay.
void keep_top_k(Scores& scores, const Sampling& sampling) {
  largest_of_runs(scores.values.data(), scores.size(), scores.runs);
  const double least =
      kth_largest(scores.values.data(), scores.size(), static_cast<std::size_t>(sampling.top_k),
                  scores.runs, scores.heap);
  keep_if(scores, [&](std::size_t n) { return scores.values[n] >= least; });
}

// The most likely tokens whose mass reaches p; the most likely one always stays.
// Source: Holtzman et al. 2019, arXiv:1904.09751.
void keep_top_p(Scores& scores, const Sampling& sampling) {
  const std::size_t size = scores.size();
  std::vector<double>& ascending = scores.sorted;
  ascending.assign(scores.values.begin(), scores.values.end());
  std::sort(ascending.begin(), ascending.end());
  const double largest = ascending.back();
  std::vector<double>& mass = scores.log_p;
  mass.clear();
  double sum = 0.0;
  for (const double value : ascending) {
    sum += std::exp(scaled(value, largest, sampling.temperature));
    mass.push_back(sum);
  }
  const double limit = (1.0 - sampling.top_p) * sum;
  const auto passed = std::upper_bound(mass.begin(), mass.end(), limit) - mass.begin();
  const std::size_t gone = std::min(static_cast<std::size_t>(passed), size - 1);
  const double last = ascending[gone];
  const auto above = static_cast<std::size_t>(
      std::count_if(scores.values.begin(), scores.values.end(),
                    [&](double value) { return value > last; }));
  std::size_t ties = size - gone - above;  // of equal scores the lowest ids stay
  keep_if(scores, [&](std::size_t n) {
    if (scores.values[n] > last) return true;
    if (scores.values[n] < last || ties == 0) return false;
    --ties;
    return true;
  });
}

// Tokens at least p times as likely as the most likely one.
// Source: Nguyen et al. 2024, arXiv:2407.01082.
void keep_min_p(Scores& scores, const Sampling& sampling) {
  const double largest = scores.largest();
  const double least = std::log(sampling.min_p);
  keep_if(scores, [&](std::size_t n) {
    return scaled(scores.values[n], largest, sampling.temperature) >= least;
  });
}

// -Σ p ln p in nats, in ascending position; a mass of 0 adds nothing.
double entropy(const std::vector<double>& log_p) {
  double sum = 0.0;
  for (const double each : log_p) {
    const double p = std::exp(each);
    if (p > 0) sum += p * each;
  }
  return -sum;
}

// The tokens whose surprise is nearest the entropy, until their mass reaches q; ties stay.
// Source: Meister et al. 2022, arXiv:2202.00666.
void keep_typical(Scores& scores, const Sampling& sampling) {
  const std::size_t size = scores.size();
  log_softmax(scores.values, scores.largest(), sampling.temperature, scores.log_p);
  const double mean = entropy(scores.log_p);
  std::vector<double>& distance = scores.sorted;
  distance.clear();
  for (const double each : scores.log_p) distance.push_back(std::abs(-each - mean));
  scores.order.resize(size);
  std::iota(scores.order.begin(), scores.order.end(), std::size_t{0});
  std::sort(scores.order.begin(), scores.order.end(), [&](std::size_t a, std::size_t b) {
    return distance[a] != distance[b] ? distance[a] < distance[b] : a < b;
  });
  std::size_t below = 0;
  double sum = 0.0;
  for (const std::size_t n : scores.order) {
    sum += std::exp(scores.log_p[n]);
    if (!(sum < sampling.typical_p)) break;
    ++below;
  }
  const double farthest = distance[scores.order[std::min(below, size - 1)]];
  keep_if(scores, [&](std::size_t n) { return distance[n] <= farthest; });
}

// Probabilities of `least` or more; the most likely ones stay in any case.
void keep_above(Scores& scores, double least) {
  const double largest = scores.largest();
  keep_if(scores, [&](std::size_t n) {
    return std::exp(scores.log_p[n]) >= least || scores.values[n] == largest;
  });
}

// Source of both: Hewitt et al. 2022, arXiv:2210.15191.
void keep_epsilon(Scores& scores, const Sampling& sampling) {
  log_softmax(scores.values, scores.largest(), sampling.temperature, scores.log_p);
  keep_above(scores, sampling.epsilon_cutoff);
}

void keep_eta(Scores& scores, const Sampling& sampling) {
  log_softmax(scores.values, scores.largest(), sampling.temperature, scores.log_p);
  const double epsilon = sampling.eta_cutoff;
  keep_above(scores, std::min(epsilon, std::sqrt(epsilon) * std::exp(-entropy(scores.log_p))));
}

}  // namespace

const Filter kFilters[] = {
    {"top_k", [](const Sampling& s) { return s.top_k > 0; }, keep_top_k},
    {"top_p", [](const Sampling& s) { return s.top_p < 1.0; }, keep_top_p},
    {"min_p", [](const Sampling& s) { return s.min_p > 0.0; }, keep_min_p},
    {"typical_p", [](const Sampling& s) { return s.typical_p < 1.0; }, keep_typical},
    {"epsilon_cutoff", [](const Sampling& s) { return s.epsilon_cutoff > 0.0; }, keep_epsilon},
    {"eta_cutoff", [](const Sampling& s) { return s.eta_cutoff > 0.0; }, keep_eta},
};

const std::size_t kFilterCount = sizeof(kFilters) / sizeof(kFilters[0]);

bool filtering(const Sampling& sampling) {
  return std::any_of(kFilters, kFilters + kFilterCount,
                     [&](const Filter& each) { return each.acts(sampling); });
}

void keep(Scores& scores, const Sampling& sampling, const char* but) {
  for (const Filter& each : kFilters) {
    const bool done = but != nullptr && std::strcmp(but, each.name) == 0;
    if (each.acts(sampling) && !done) each.keep(scores, sampling);
  }
}

const char* first_filter(const Sampling& sampling) {
  for (const Filter& each : kFilters) {
    if (each.acts(sampling)) return each.name;
  }
  return nullptr;
}

template <typename T>
double kth_largest(const T* scores, std::size_t size, std::size_t k, const std::vector<double>& runs,
                   std::vector<double>& heap) {
  if (k >= size) return static_cast<double>(*std::min_element(scores, scores + size));
  const auto place = static_cast<std::ptrdiff_t>(k) - 1;
  // As many runs have a score from the k-th largest of their own largest up, so k scores do.
  T least = std::numeric_limits<T>::lowest();
  if (k <= runs.size()) {
    heap.assign(runs.begin(), runs.end());
    std::nth_element(heap.begin(), heap.begin() + place, heap.end(), std::greater<>());
    least = static_cast<T>(heap[k - 1]);
  }
  heap.clear();
  for_each_from(scores, size, runs, least,
                [&](std::size_t n) { heap.push_back(static_cast<double>(scores[n])); });
  if (heap.size() < k) return -std::numeric_limits<double>::infinity();  // all others are banned
  std::nth_element(heap.begin(), heap.begin() + place, heap.end(), std::greater<>());
  return heap[k - 1];
}

template double kth_largest(const float*, std::size_t, std::size_t, const std::vector<double>&,
                            std::vector<double>&);
template double kth_largest(const double*, std::size_t, std::size_t, const std::vector<double>&,
                            std::vector<double>&);

}  // namespace headport::internal
