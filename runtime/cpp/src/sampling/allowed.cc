// The only tokens that may follow: a list, or what a callback says at each step.
#include "error.h"
#include "sampling/rules.h"

namespace headport::internal {

// This step's allowed ids; a callback is asked just once.
AllowedAnswer ask_allowed(const Sampling& sampling, const Context& context) {
  if (!sampling.allowed) {
    if (sampling.allowed_ids.empty()) return {};
    return {false, sampling.allowed_ids};
  }
  const AllowedAnswer answer = sampling.allowed(context);
  if (!answer.all && answer.ids.empty()) {
    throw Error(HEADPORT_REQUEST_ERROR,
                text("allowed: the callback of prompt ", context.index, ", step ",
                     context.tokens.size,
                     " allows no token; allow an end token where the text is done"));
  }
  return answer;
}

// Bans all that is not allowed. Where all that is allowed was banned before, its score is 0.
void keep_allowed(Row& row) {
  const std::size_t size = row.columns.size();
  std::fill(row.mask.begin(), row.mask.end(), std::uint8_t{0});
  bool left = false;
  for (const std::int64_t id : row.allowed.ids) {
    const std::int64_t column = row.columns.find(id);
    if (column < 0) continue;
    row.mask[static_cast<std::size_t>(column)] = 1;
    left = left || row.scores[column] > kBanned;
  }
  row.overruled = !left;
  for (std::size_t column = 0; column < size; ++column) {
    if (row.mask[column] == 0) {
      row.scores[column] = kBanned;
    } else if (!left) {
      row.scores[column] = 0.0;
    }
  }
}

}  // namespace headport::internal
