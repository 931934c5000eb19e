// Beam search without a model: log-probabilities in, the beams to go on with out. Mirrors
// runtime/sampling/beam_state.py; SAMPLING.md has the rules.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "sampling/columns.h"
#include "sampling/settings.h"

namespace headport::internal {

// A reply, complete or not.
struct Hypothesis {
  Ids token_ids;        // new tokens, original ids
  double log_p = 0.0;   // Σ of the processed ln p of its tokens
  double score = 0.0;   // of a complete one: log_p / tokens ^ length_penalty
};

class BeamState {
 public:
  // `ends` says whether a reply ends with its last token; `end_tokens` is how many there are: more
  // of them make more candidates.
  BeamState(const Beams& beams, std::size_t max_new_tokens, std::size_t end_tokens,
            std::function<bool(const Ids&)> ends);

  const std::vector<Hypothesis>& open() const { return open_; }          // best first
  const std::vector<Hypothesis>& complete() const { return complete_; }  // best first
  bool done() const { return done_; }

  // One step: what may follow each open beam, in order, then `advance`. `log_p` is the processed
  // ln p of each column, -inf where it is banned; `overruled` where the rules of the beam had to
  // give way: such a beam counts only where all are.
  void offer(std::size_t beam, const std::vector<double>& log_p, bool overruled);
  // The best continuations become complete or stay open. Gives for each beam that is open now which
  // of the open ones before it continues; its token is its last.
  const std::vector<std::size_t>& advance(const Columns& columns);

 private:
  struct Candidate {
    double total;
    std::size_t beam, column;
    // Ties to the better beam, then to the lowest id.
    bool operator<(const Candidate& other) const {
      if (total != other.total) return total > other.total;
      return beam != other.beam ? beam < other.beam : column < other.column;
    }
  };

  void complete(Ids token_ids, double log_p);
  bool settled() const;

  Beams beams_;
  std::size_t max_new_tokens_;
  std::size_t most_;  // candidates of a step
  std::function<bool(const Ids&)> ends_;
  std::vector<Hypothesis> open_{Hypothesis{}};
  std::vector<Hypothesis> complete_;
  std::vector<Candidate> sound_, overruled_;  // heaps, the worst on top
  std::vector<std::size_t> origins_;
  bool any_sound_ = false;
  bool done_ = false;
};

}  // namespace headport::internal
