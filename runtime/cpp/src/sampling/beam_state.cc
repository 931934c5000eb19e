#include "sampling/beam_state.h"

#include <algorithm>
#include <cmath>

namespace headport::internal {

BeamState::BeamState(const Beams& beams, std::size_t max_new_tokens, std::size_t end_tokens,
                     std::function<bool(const Ids&)> ends)
    : beams_(beams),
      max_new_tokens_(max_new_tokens),
      most_(std::max<std::size_t>(2, 1 + end_tokens) * static_cast<std::size_t>(beams.num_beams)),
      ends_(std::move(ends)) {}

void BeamState::offer(std::size_t beam, const std::vector<double>& log_p, bool overruled) {
  std::vector<Candidate>& best = overruled ? overruled_ : sound_;
  any_sound_ = any_sound_ || !overruled;
  const double before = open_[beam].log_p;
  for (std::size_t column = 0; column < log_p.size(); ++column) {
    const Candidate found{before + log_p[column], beam, column};
    const bool full = best.size() == most_;
    if (!(found.total > kBanned) || (full && !(found < best.front()))) continue;
    if (full) {
      std::pop_heap(best.begin(), best.end());
      best.pop_back();
    }
    best.push_back(found);
    std::push_heap(best.begin(), best.end());
  }
}

const std::vector<std::size_t>& BeamState::advance(const Columns& columns) {
  std::vector<Candidate>& best = any_sound_ ? sound_ : overruled_;
  std::sort(best.begin(), best.end());
  const auto beams = static_cast<std::size_t>(beams_.num_beams);
  std::vector<Hypothesis> opened;
  origins_.clear();
  for (std::size_t rank = 0; rank < best.size(); ++rank) {
    const Candidate& each = best[rank];
    Ids token_ids = open_[each.beam].token_ids;
    token_ids.push_back(columns.id(each.column));
    if (!ends_(token_ids)) {
      if (opened.size() == beams) continue;
      opened.push_back({std::move(token_ids), each.total, 0.0});
      origins_.push_back(each.beam);
    } else if (rank < beams) {  // the others only stand by for beams that end
      complete(std::move(token_ids), each.total);
    }
  }
  open_ = std::move(opened);
  sound_.clear();
  overruled_.clear();
  any_sound_ = false;
  done_ = open_.empty() || settled();
  return origins_;
}

void BeamState::complete(Ids token_ids, double log_p) {
  const double length = static_cast<double>(token_ids.size());
  const double score = log_p / std::pow(length, beams_.length_penalty);
  // Of equal ones the older is first.
  const auto place =
      std::upper_bound(complete_.begin(), complete_.end(), score,
                       [](double found, const Hypothesis& each) { return found > each.score; });
  complete_.insert(place, Hypothesis{std::move(token_ids), log_p, score});
  if (complete_.size() > static_cast<std::size_t>(beams_.num_beams)) complete_.pop_back();
}

// Whether there are enough complete replies, and no open beam is taken to become better.
bool BeamState::settled() const {
  if (complete_.size() < static_cast<std::size_t>(beams_.num_beams)) return false;
  if (beams_.early_stopping == EarlyStopping::kYes) return true;
  const bool lasting =
      beams_.early_stopping == EarlyStopping::kNever && beams_.length_penalty > 0.0;
  const std::size_t length = lasting ? max_new_tokens_ : open_[0].token_ids.size();
  const double hope =
      open_[0].log_p / std::pow(static_cast<double>(length), beams_.length_penalty);
  return hope <= complete_.back().score;
}

}  // namespace headport::internal
