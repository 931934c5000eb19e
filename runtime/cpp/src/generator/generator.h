// A bundle that answers: prompts in, replies out.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "bundle/vocabulary.h"
#include "generator/request.h"
#include "generator/runner.h"
#include "sampling/sampler.h"

namespace headport::internal {

// One reply. Likelihoods of token n are `likelihoods[n]` and the next `top_count` of `top`.
struct Reply {
  std::size_t prompt = 0;
  std::size_t sample = 0;
  Ids token_ids;
  headport_finish finish = HEADPORT_NOT_FINISHED;
  bool has_seed = false;
  std::uint64_t seed = 0;
  std::vector<Likelihood> likelihoods;
  std::vector<TopLogprob> top;
};

// Continues prompts, all that fit side by side. A row's tokens depend on its prompt, its seed and
// the request, not on what runs with it.
class Generator {
 public:
  // `most_rows` are worked on at once; a prompt and its reply may have `max_context` tokens, and a
  // reply whose length nobody asked for `reply_limit`, 0 = no limit.
  // Errors: HEADPORT_BUNDLE_ERROR if the head has fewer columns than there are ids.
  Generator(std::unique_ptr<Runner> runner, IdMap ids, std::size_t most_rows,
            std::int64_t max_context, std::int64_t reply_limit = 0);

  // The replies to the first prompt, then those to the second, and so on.
  // Errors: HEADPORT_PROMPT_ERROR, HEADPORT_REQUEST_ERROR, HEADPORT_NON_FINITE_ERROR,
  // HEADPORT_CANCELLED, HEADPORT_LIBRARY_ERROR. One of one row ends the call.
  std::vector<Reply> generate(const std::vector<IdSpan>& prompts, const Request& request);

  const IdMap& ids() const { return ids_; }
  std::int64_t max_context() const { return max_context_; }

 private:
  struct Sequence {
    Reply reply;
    IdSpan prompt;
    std::size_t limit = 0;  // most new tokens
  };

  std::vector<std::size_t> limits_of(const std::vector<IdSpan>& prompts,
                                     const Request& request) const;
  std::vector<Sequence> sequences_of(const std::vector<IdSpan>& prompts,
                                     const Request& request) const;
  void run(std::vector<Sequence>& sequences, const Request& request);
  // Logits of a row by ascending original id.
  const float* ordered(const float* logits);
  void advance(Sequence& sequence, const float* logits, const Request& request);
  void report(const Sequence& sequence, const Request& request, std::size_t top_first);

  std::unique_ptr<Runner> runner_;
  IdMap ids_;
  Columns columns_;
  Sampler sampler_;
  std::size_t most_rows_;
  std::int64_t max_context_;
  std::int64_t reply_limit_;
  std::vector<float> ordered_;                  // [K], where the head has another order
  std::vector<Sequence*> running_;              // by row
  std::vector<std::int64_t> latest_;            // [rows], latest token of each
  std::vector<headport_top_logprob> reported_;  // of the token that is reported
  std::mutex mutex_;                            // one call at a time
};

}  // namespace headport::internal
