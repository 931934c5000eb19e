// From one row of logits to one token: processors → filters → Gumbel argmax.
// SAMPLING.md states every edge; runtime/sampling/sampler.py is the same in Python.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling/columns.h"
#include "sampling/noise.h"
#include "sampling/rules.h"
#include "sampling/scores.h"

namespace headport::internal {

struct TopLogprob {
  std::int64_t token_id = 0;
  double logprob = 0.0;  // natural logarithm, of the model's own distribution
};

// How likely a chosen token was.
struct Likelihood {
  double logprob = 0.0;            // of the model, before any rule acts
  double processed_logprob = 0.0;  // that it was drawn with
};

// Chooses tokens of one vocabulary. It owns all memory that a choice needs, so choosing takes none.
class Sampler {
 public:
  // `columns` must stay.
  explicit Sampler(const Columns& columns);

  // Chooses a token from one row, float32 [K]. Needs no key where the temperature is 0.
  // Errors: HEADPORT_NON_FINITE_ERROR; HEADPORT_REQUEST_ERROR where every token is banned or a
  // callback gives what it must not.
  std::int64_t choose(const float* logits, const Sampling& sampling, const NoiseKey& key,
                      const Context& context);

  // How likely a chosen token was, and the `count` likeliest ones, appended to `top`. Right after
  // `choose`, with the same row.
  Likelihood likelihood(std::int64_t token_id, const float* logits, const Sampling& sampling,
                        std::size_t count, std::vector<TopLogprob>& top);

  // What the last `choose` kept, for tests: processed scores of all columns are made by `process`.
  const std::vector<double>& process(const float* logits, const Sampling& sampling,
                                     const Context& context);
  const Scores& kept() const { return scores_; }

 private:
  void refuse_not_finite(const float* logits, const Context& context) const;
  template <typename T>
  T least_of(const T* scores, const Sampling& sampling);
  template <typename T>
  void collect(const T* scores, const Sampling& sampling, const Context& context);
  [[noreturn]] void refuse_banned(const Context& context) const;
  std::int64_t draw(const Sampling& sampling, const NoiseKey& key) const;

  const Columns& columns_;
  Tally tally_;
  std::vector<std::pair<std::int64_t, double>> sums_;
  std::vector<std::uint8_t> mask_;
  std::vector<std::int64_t> identities_;
  std::vector<double> processed_;  // [K], filled where a processor acts
  bool processed_acts_ = false;
  Scores scores_;
  std::vector<std::size_t> best_;
};

}  // namespace headport::internal
