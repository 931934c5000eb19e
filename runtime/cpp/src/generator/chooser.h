// Rows of the runner → one token per row. What a head gives decides how it is chosen.
#pragma once

#include <memory>
#include <vector>

#include "generator/runner.h"
#include "generator/stats.h"
#include "sampling/sampler.h"

namespace headport::internal {

// What one row asks for at one step.
struct Draw {
  std::size_t row = 0;  // of the runner
  const Sampling* sampling = nullptr;
  NoiseKey key;  // counts where the temperature is above 0
  Context context;
  std::int64_t logprobs = -1;  // how many of the most likely tokens are told; -1 = no likelihoods
  // Where likelihoods go, where they are asked for.
  std::vector<Likelihood>* likelihoods = nullptr;
  std::vector<TopLogprob>* top = nullptr;
  std::int64_t token = -1;  // the choice
};

class Chooser {
 public:
  virtual ~Chooser() = default;
  // Room for that many rows, so that choosing takes no memory.
  virtual void reserve(std::size_t) {}
  // Makes the choice of each draw, whose rows are 0 … N - 1.
  // Errors: as `Sampler::choose`; one row's error is that of all.
  virtual void choose(std::vector<Draw>& draws) = 0;
  // All logits of rows 0 … count - 1 by ascending original id, each row `width` of the runner apart;
  // valid until the next call.
  virtual const float* logits(std::size_t count) = 0;
};

// The chooser for what a runner's head gives. `exact`, of a head that gives candidates: take all
// original logits where these do not decide; else the quantised ones, with the exact ones of the
// candidates written into them. All that is given must stay.
std::unique_ptr<Chooser> make_chooser(Runner& runner, const Columns& columns, Sampler& sampler,
                                      Stats& stats, bool exact);

}  // namespace headport::internal
