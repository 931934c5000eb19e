#include "generator/stats.h"

#include "sampling/filters.h"
#include "sampling/processors.h"

namespace headport::internal {
namespace {

constexpr std::size_t kUnfiltered = 2;  // greedy, temperature

std::size_t mode_of(const Sampling& sampling) {
  std::size_t mode = 0;
  if (sampling.temperature > 0.0) {
    std::size_t filter = 0;
    while (filter < kFilterCount && !kFilters[filter].acts(sampling)) ++filter;
    mode = filter < kFilterCount ? kUnfiltered + filter : 1;
  }
  return 2 * mode + (processing(sampling) ? 1 : 0);
}

std::string name_of(std::size_t mode) {
  const std::size_t kind = mode / 2;
  const std::string name =
      kind == 0 ? "greedy" : kind == 1 ? "temperature" : kFilters[kind - kUnfiltered].name;
  return mode % 2 == 1 ? name + ", processed" : name;
}

}  // namespace

void Stats::count(const Sampling& sampling, Decided decided) {
  static constexpr std::int64_t Counts::*kFields[] = {&Counts::certified, &Counts::fallbacks,
                                                      &Counts::unproved};
  const std::lock_guard<std::mutex> lock(mutex_);
  ++(modes_[mode_of(sampling)].*kFields[static_cast<std::size_t>(decided)]);
}

void Stats::count_tokens(std::int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  new_tokens_ += count;
}

void Stats::count_conditions(std::int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  condition_runs_ = count;
}

std::vector<std::pair<std::string, Counts>> Stats::modes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::pair<std::string, Counts>> found;
  for (std::size_t mode = 0; mode < modes_.size(); ++mode) {
    const Counts& each = modes_[mode];
    if (each.certified + each.fallbacks + each.unproved > 0) found.emplace_back(name_of(mode), each);
  }
  return found;
}

std::int64_t Stats::new_tokens() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return new_tokens_;
}

std::int64_t Stats::condition_runs() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return condition_runs_;
}

}  // namespace headport::internal
