// Beam search with a model: one prompt, `num_beams` rows of the runner. Mirrors runtime/beams.py.
//
//     prompt in row 0 ─► ln p of the open beams ─► processors ─► BeamState
//          ▲                                                          │
//          └─ last tokens ◄── rows reordered to what each beam continues
#pragma once

#include <vector>

#include "generator/chooser.h"
#include "generator/sequence.h"
#include "sampling/beam_state.h"

namespace headport::internal {

class BeamSearch {
 public:
  // `prompt` is an empty sequence of the prompt, `logits` are taken from the chooser. The runner has
  // room for `num_beams` rows. All that is given must stay.
  BeamSearch(Runner& runner, Chooser& chooser, Sampler& sampler, const Columns& columns,
             const Sequence& prompt, const Request& request);

  bool done() const { return state_.done(); }
  // Continues every open beam by one token.
  // Errors: HEADPORT_NON_FINITE_ERROR; HEADPORT_REQUEST_ERROR if the rules ban every token after
  // every beam, or a callback fails.
  void step();
  // The best replies, best first, each with its score.
  std::vector<Reply> replies() const;

 private:
  bool is_complete(const Ids& token_ids) const;
  Sequence played(const Ids& token_ids) const;

  Runner& runner_;
  Chooser& chooser_;
  Sampler& sampler_;
  const Columns& columns_;
  const Sequence& prompt_;
  const Request& request_;
  BeamState state_;
  std::vector<std::size_t> origins_;
  std::vector<std::int64_t> latest_;
  bool begun_ = false;
};

}  // namespace headport::internal
