// Rules that ban tokens, whatever their scores.
#include "sampling/rules.h"

namespace headport::internal {
namespace {

void ban(Row& row, std::int64_t id) {
  const std::int64_t column = row.columns.find(id);
  if (column >= 0) row.scores[column] = kBanned;
}

bool contains(IdSpan ids, std::int64_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

// Bans each id that would complete an n-gram which stands in prompt and reply already.
void ban_repeated_ngrams(Row& row) {
  const auto size = static_cast<std::size_t>(row.sampling.no_repeat_ngram_size);
  const Context& past = row.context;
  const std::size_t length = past.length();
  if (length < size) return;
  const std::size_t tail = length - (size - 1);  // where the latest n - 1 ids begin
  for (std::size_t first = 0; first + size <= length; ++first) {
    std::size_t same = 0;
    while (same < size - 1 && past.at(first + same) == past.at(tail + same)) ++same;
    if (same == size - 1) ban(row, past.at(first + same));
  }
}

// Bans the last id of each sequence whose other ids are the latest tokens. A sequence that is an
// end token alone is left out.
void ban_bad_words(Row& row) {
  for (const Ids& words : row.sampling.bad_words) {
    if (words.size() == 1 && contains(row.context.ends, words[0])) continue;
    if (ends_with(row.context, words, words.size() - 1)) ban(row, words.back());
  }
}

// No end token below `min_length` tokens in all, nor below `min_new_tokens` new ones.
void ban_early_ends(Row& row) {
  const auto length = static_cast<std::int64_t>(row.context.length());
  const auto step = static_cast<std::int64_t>(row.context.tokens.size);
  if (length >= row.sampling.min_length && step >= row.sampling.min_new_tokens) return;
  for (const std::int64_t id : row.context.ends) ban(row, id);
}

void ban_suppressed(Row& row) {
  for (const std::int64_t id : row.sampling.suppress_tokens) ban(row, id);
}

// As the first new token that is not forced.
void ban_at_begin(Row& row) {
  const bool forced = row.sampling.forced_bos && row.context.prompt.size == 1;
  if (row.context.tokens.size != (forced ? 1u : 0u)) return;
  for (const std::int64_t id : row.sampling.begin_suppress_tokens) ban(row, id);
}

}  // namespace headport::internal
