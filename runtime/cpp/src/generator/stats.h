// Counts since a generator was made.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "sampling/settings.h"

namespace headport::internal {

// How a token was chosen from a head that gives candidates.
enum class Decided { kCertified, kFallback, kUnproved };

struct Counts {
  std::int64_t certified = 0;  // from the candidates, proved to be the exact choice
  std::int64_t fallbacks = 0;  // from all logits, because the candidates did not decide
  std::int64_t unproved = 0;   // without proof, by `exact` or without a certificate
};

class Stats {
 public:
  void count(const Sampling& sampling, Decided decided);
  void count_tokens(std::int64_t count);
  void count_conditions(std::int64_t count);  // products of conditions, in all

  // By mode: greedy, temperature or the first filter, and whether processors act. Modes of which no
  // token was chosen are left out.
  std::vector<std::pair<std::string, Counts>> modes() const;
  std::int64_t new_tokens() const;
  std::int64_t condition_runs() const;

 private:
  static constexpr std::size_t kModes = 16;  // greedy, temperature, six filters; each processed or not

  mutable std::mutex mutex_;
  std::array<Counts, kModes> modes_{};
  std::int64_t new_tokens_ = 0;
  std::int64_t condition_runs_ = 0;
};

}  // namespace headport::internal
