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
  // `allowed` is what `ask_allowed` gave for this row and step.
  // Errors: HEADPORT_NON_FINITE_ERROR; HEADPORT_REQUEST_ERROR where every token is banned or a
  // callback gives what it must not.
  std::int64_t choose(const float* logits, const Sampling& sampling, const AllowedAnswer& allowed,
                      const NoiseKey& key, const Context& context);

  // How likely a chosen token was, and the `count` likeliest ones, appended to `top`. Right after
  // `choose`, with the same row.
  Likelihood likelihood(std::int64_t token_id, const float* logits, const Sampling& sampling,
                        std::size_t count, std::vector<TopLogprob>& top);

  // Processed scores of all columns; valid until the next call.
  const std::vector<double>& process(const float* logits, const Sampling& sampling,
                                     const AllowedAnswer& allowed, const Context& context);
  // As `process`, from ln softmax in place of logits: what beams are searched with. The rules were
  // overruled where all that is allowed was banned.
  struct Processed {
    const std::vector<double>& scores;
    bool overruled;
  };
  Processed process_log_softmax(const float* logits, const Sampling& sampling,
                                const AllowedAnswer& allowed, const Context& context);
  // As `process`, from scores of 0: only bans count in what comes out.
  Processed process_nothing(const Sampling& sampling, const AllowedAnswer& allowed,
                            const Context& context);

  // What the last `choose` kept, for tests.
  const Scores& kept() const { return scores_; }
  // How often top-p alone had to add up in the stated order.
  std::uint64_t sorted_rows() const { return sorted_rows_; }

  // Errors: HEADPORT_NON_FINITE_ERROR if one of [K] logits is NaN or infinite.
  void refuse_not_finite(const float* logits, const Context& context) const;
  [[noreturn]] static void refuse_banned(const Context& context);

 private:
  bool apply(const Sampling& sampling, const AllowedAnswer& allowed, const Context& context);
  template <typename T>
  T least_of(const T* scores, const Sampling& sampling);
  template <typename T>
  void collect(const T* scores, const Sampling& sampling, const Context& context);
  template <typename T>
  void collect_kept(const T* scores, const Sampling& sampling, const Context& context);
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
  std::uint64_t sorted_rows_ = 0;
};

}  // namespace headport::internal
