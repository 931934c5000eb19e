// Tokens that a bundle's generation_config puts at the begin and at the end of every reply.
// Mirrors runtime/sampling/forced.py.
#include <algorithm>

#include "sampling/rules.h"

namespace headport::internal {

// Of the two that transformers has, the end overrules the begin.
IdSpan forced_ids(const Sampling& sampling, const Context& context) {
  const std::size_t step = context.tokens.size;
  if (!sampling.forced_eos.empty() && step + 1 == context.limit) return sampling.forced_eos;
  if (sampling.forced_bos && context.length() == 1) return {&*sampling.forced_bos, 1};
  return {};
}

// Gives what is forced a score of 0, whatever it had, and bans all else.
void force_ids(Row& row) {
  const IdSpan forced = forced_ids(row.sampling, row.context);
  if (forced.empty()) return;
  std::fill(row.scores, row.scores + row.columns.size(), kBanned);
  for (const std::int64_t id : forced) {
    const std::int64_t column = row.columns.find(id);
    if (column >= 0) row.scores[column] = 0.0;
  }
}

}  // namespace headport::internal
