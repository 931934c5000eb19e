#include "generator/chooser.h"

#include "generator/candidate_chooser.h"

namespace headport::internal {
namespace {

// Chooses from a head that gives all logits.
class LogitsChooser final : public Chooser {
 public:
  LogitsChooser(Runner& runner, Sampler& sampler) : runner_(runner), sampler_(sampler) {}

  void choose(std::vector<Draw>& draws) override {
    const float* all = runner_.logits(draws.size());
    for (Draw& draw : draws) {
      choose_from(sampler_, all + draw.row * runner_.width(), draw,
                  ask_allowed(*draw.sampling, draw.context));
    }
  }
  const float* logits(std::size_t count) override { return runner_.logits(count); }

 private:
  Runner& runner_;
  Sampler& sampler_;
};

}  // namespace

void choose_from(Sampler& sampler, const float* logits, Draw& draw, const AllowedAnswer& allowed) {
  const std::int64_t found =
      sampler.choose(logits, *draw.sampling, allowed, draw.key, draw.context);
  if (draw.token < 0) draw.token = found;
  if (draw.logprobs < 0) return;
  draw.likelihoods->push_back(sampler.likelihood(draw.token, logits, *draw.sampling,
                                                 static_cast<std::size_t>(draw.logprobs), *draw.top));
}

std::unique_ptr<Chooser> make_chooser(Runner& runner, const Columns& columns, Sampler& sampler,
                                      Stats& stats, bool exact) {
  CandidateHead* head = runner.candidates();
  if (head == nullptr) return std::make_unique<LogitsChooser>(runner, sampler);
  return std::make_unique<CandidateChooser>(*head, columns, sampler, stats, exact);
}

}  // namespace headport::internal
