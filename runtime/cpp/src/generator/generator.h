// A bundle that answers: prompts in, replies out.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "bundle/conditions.h"
#include "bundle/vocabulary.h"
#include "generator/chooser.h"
#include "generator/request.h"
#include "generator/runner.h"
#include "generator/sequence.h"
#include "sampling/sampler.h"
#include "text/texts.h"

namespace headport::internal {

// Continues prompts, all that fit side by side. A row's tokens depend on its prompt, its seed and
// the request, not on what runs with it.
class Generator {
 public:
  // `most_rows` are worked on at once; a prompt and its reply may have `max_context` tokens, and a
  // reply whose length nobody asked for `reply_limit`, 0 = no limit. `exact` is for heads that give
  // candidates, see `make_chooser`. `texts` may be null: then none can be asked for; likewise
  // `conditions`.
  // Errors: HEADPORT_BUNDLE_ERROR if the head has fewer columns than there are ids.
  Generator(std::unique_ptr<Runner> runner, IdMap ids, std::size_t most_rows,
            std::int64_t max_context, std::int64_t reply_limit = 0, bool exact = true,
            std::shared_ptr<BundleTexts> texts = nullptr,
            std::optional<Conditions> conditions = std::nullopt);

  // The replies to the first prompt, then those to the second, and so on.
  // Errors: HEADPORT_PROMPT_ERROR, HEADPORT_REQUEST_ERROR, HEADPORT_NON_FINITE_ERROR,
  // HEADPORT_CANCELLED, HEADPORT_LIBRARY_ERROR. One of one row ends the call.
  std::vector<Reply> generate(const std::vector<IdSpan>& prompts, const Request& request);

  const IdMap& ids() const { return ids_; }
  std::int64_t max_context() const { return max_context_; }
  const Stats& stats() const { return stats_; }

 private:
  std::vector<std::size_t> limits_of(const std::vector<IdSpan>& prompts,
                                     const Request& request) const;
  std::vector<Sequence> sequences_of(const std::vector<IdSpan>& prompts,
                                     const Request& request) const;
  void check_conditions(const Request& request) const;
  void tell_conditions(std::vector<Sequence>& sequences, const Request& request);
  void run(std::vector<Sequence>& sequences, const Request& request);
  std::vector<Reply> search(const std::vector<Sequence>& sequences, const Request& request);
  void choose(const Request& request);
  void report(const Sequence& sequence, const Request& request, std::size_t top_first,
              const std::string& part);

  std::unique_ptr<Runner> runner_;
  IdMap ids_;
  Columns columns_;
  Sampler sampler_;
  std::size_t most_rows_;
  std::int64_t max_context_;
  std::int64_t reply_limit_;
  std::shared_ptr<BundleTexts> texts_;
  std::optional<Conditions> conditions_;
  std::vector<std::vector<float>> given_vectors_;  // of a call's conditions that have no name, [H] each
  Stats stats_;
  std::unique_ptr<Chooser> chooser_;
  std::vector<Sequence*> running_;              // by row
  std::vector<Draw> draws_;                     // by row
  std::vector<std::int64_t> latest_;            // [rows], latest token of each
  std::vector<headport_top_logprob> reported_;  // of the token that is reported
  std::mutex mutex_;                            // one call at a time
};

}  // namespace headport::internal
