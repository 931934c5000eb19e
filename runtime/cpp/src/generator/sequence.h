// One reply on its way: what it asks for, what it has got, and when it ends.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "generator/request.h"
#include "sampling/sampler.h"
#include "text/text_stream.h"

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
  std::string text;             // where texts are asked for
  std::optional<double> score;  // of a beam
};

struct Sequence {
  Reply reply;
  IdSpan prompt;
  std::size_t limit = 0;           // most new tokens
  std::optional<TextStream> text;  // where texts are asked for
  bool watched = false;            // text is needed with every token, not only at the end
  const float* condition = nullptr;  // what its hidden states get added, [H]

  Context context(const Request& request) const {
    return {prompt, reply.token_ids, request.ends, reply.prompt, reply.sample, limit};
  }

  // Appends a token and gives the text that became definite with it. What ends a reply: an end token
  // before a stop text before the limit.
  std::string accept(std::int64_t token, const Request& request);
};

}  // namespace headport::internal
