#include "generator/beams.h"

#include <algorithm>

#include "error.h"

namespace headport::internal {

BeamSearch::BeamSearch(Runner& runner, Chooser& chooser, Sampler& sampler, const Columns& columns,
                       const Sequence& prompt, const Request& request)
    : runner_(runner),
      chooser_(chooser),
      sampler_(sampler),
      columns_(columns),
      prompt_(prompt),
      request_(request),
      state_(request.beams, prompt.limit, request.ends.size(),
             [this](const Ids& token_ids) { return is_complete(token_ids); }) {}

void BeamSearch::step() {
  const std::vector<Hypothesis>& open = state_.open();
  if (!begun_) {
    runner_.begin(0, prompt_.prompt);
    begun_ = true;
  } else {
    latest_.clear();
    for (const Hypothesis& beam : open) latest_.push_back(beam.token_ids.back());
    runner_.reorder(origins_);
    runner_.step(latest_.data(), latest_.size());
  }
  for (std::size_t rank = 0; prompt_.condition != nullptr && rank < open.size(); ++rank) {
    runner_.add(rank, prompt_.condition);
  }
  const float* logits = chooser_.logits(open.size());
  const std::size_t steps = open[0].token_ids.size();
  for (std::size_t rank = 0; rank < open.size(); ++rank) {
    const Context context{prompt_.prompt, open[rank].token_ids, request_.ends, prompt_.reply.prompt,
                          rank, prompt_.limit};
    const float* row = logits + rank * runner_.width();
    sampler_.refuse_not_finite(row, context);
    const auto found = sampler_.process_log_softmax(
        row, request_.sampling, ask_allowed(request_.sampling, context), context);
    state_.offer(rank, found.scores, found.overruled);
  }
  origins_ = state_.advance(columns_);
  if (state_.open().empty() && state_.complete().empty()) {
    throw Error(HEADPORT_REQUEST_ERROR,
                text("prompt ", prompt_.reply.prompt, ", step ", steps,
                     ": the request's rules ban every token after every beam; loosen them"));
  }
}

std::vector<Reply> BeamSearch::replies() const {
  std::vector<Reply> found;
  for (const Hypothesis& each : state_.complete()) {
    if (found.size() == static_cast<std::size_t>(request_.n)) break;
    Reply reply = played(each.token_ids).reply;
    reply.sample = found.size();
    reply.score = each.score;
    found.push_back(std::move(reply));
  }
  return found;
}

bool BeamSearch::is_complete(const Ids& token_ids) const {
  const bool ended = std::find(request_.ends.begin(), request_.ends.end(), token_ids.back()) !=
                     request_.ends.end();
  if (ended || token_ids.size() == prompt_.limit) return true;
  return !request_.stop.empty() && played(token_ids).reply.finish != HEADPORT_NOT_FINISHED;
}

Sequence BeamSearch::played(const Ids& token_ids) const {
  Sequence found = prompt_;
  for (const std::int64_t token : token_ids) found.accept(token, request_);
  return found;
}

}  // namespace headport::internal
