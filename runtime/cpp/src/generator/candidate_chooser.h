// One token per row from a head that gives candidates: proved, else by the full product. Mirrors
// runtime/sampling/exact.py.
//
//     filters or greedy ─► candidates by bound ─► decided? ─► token
//     temperature alone ─► candidates by bound + noise ─► decided? ─► token
//     min-p undecided   ─► candidates by bound + noise ─► decided? ─► token
//     still undecided   ─► all logits of that row, counted as a fallback
//
// Where processors act, both kinds of candidates are picked with their bans and lifts.
#pragma once

#include <optional>
#include <vector>

#include "generator/chooser.h"
#include "sampling/processed_candidates.h"

namespace headport::internal {

// A row's choice from all its logits, or its likelihood alone where the token is known already.
void choose_from(Sampler& sampler, const float* logits, Draw& draw, const AllowedAnswer& allowed);

class CandidateChooser final : public Chooser {
 public:
  CandidateChooser(CandidateHead& head, const Columns& columns, Sampler& sampler, Stats& stats,
                   bool exact)
      : head_(head),
        columns_(columns),
        sampler_(sampler),
        stats_(stats),
        exact_(exact),
        processor_(columns) {}

  void reserve(std::size_t rows) override;
  void choose(std::vector<Draw>& draws) override;
  const float* logits(std::size_t count) override;

 private:
  // What is known of a draw besides what it asks for.
  struct Asked {
    Draw* draw = nullptr;
    Ids allowed_ids;  // what its callback said, which is asked for other rows before it is used
    AllowedAnswer allowed;
    Plan plan;
    std::optional<double> largest;  // exact logit, where candidates without noise proved it
  };
  using Group = std::vector<std::size_t>;  // places among `asked_`

  void ask(std::vector<Draw>& draws);
  void decide();
  void by_bound(const Group& group, bool steered);
  void by_noise(const Group& group);
  void from_all(const Group& group);
  // The head's candidates for some rows; with noise, `noise_` holds a row for each.
  Candidates pick(const Group& group, bool noisy);
  // Candidates of one row, processed; false where all of them are banned.
  bool read(const Candidates& found, std::size_t place, const Asked& asked);
  std::pair<double, double> tail_mass(const Asked& asked, double temperature);

  CandidateHead& head_;
  const Columns& columns_;
  Sampler& sampler_;
  Stats& stats_;
  bool exact_;
  CandidateProcessor processor_;
  Decider decider_;
  CandidateRow row_;
  std::vector<Asked> asked_;  // as many as there are rows; the first `count_` are in use
  std::size_t count_ = 0;
  Group plain_, steered_, noisy_, again_, rest_;
  std::vector<std::size_t> rows_;
  std::vector<float> noise_;           // [rows, width]
  std::vector<std::uint8_t> outside_;  // [K]
};

}  // namespace headport::internal
