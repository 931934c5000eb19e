// The caller's own rule, after all others.
#include <cmath>

#include "error.h"
#include "sampling/rules.h"

namespace headport::internal {

void ask_caller(Row& row) {
  const std::size_t size = row.columns.size();
  const std::int64_t* ids = row.columns.ids();
  if (ids == nullptr) {
    while (row.identities.size() < size) {
      row.identities.push_back(static_cast<std::int64_t>(row.identities.size()));
    }
    ids = row.identities.data();
  }
  row.sampling.process_scores(row.context, row.scores, ids, size);
  for (std::size_t column = 0; column < size; ++column) {
    const double score = row.scores[column];
    if (std::isnan(score) || (std::isinf(score) && score > 0)) {
      throw Error(HEADPORT_REQUEST_ERROR,
                  text("process_scores, prompt ", row.context.index, ", step ",
                       row.context.tokens.size, ": scores without NaN and +inf were expected, ",
                       score, " was given for id ", row.columns.id(column)));
    }
  }
}

}  // namespace headport::internal
