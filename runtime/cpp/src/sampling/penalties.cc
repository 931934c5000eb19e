// Rules that add to scores or scale them; none bans a token.
#include "sampling/rules.h"

namespace headport::internal {

void sum_biases(const Sampling& sampling, const Context& context,
                std::vector<std::pair<std::int64_t, double>>& sums) {
  sums.clear();
  for (const auto& [words, bias] : sampling.logit_bias) {
    if (!ends_with(context, words, words.size() - 1)) continue;
    bool known = false;
    for (auto& [id, sum] : sums) {
      if (id == words.back()) {
        sum += bias;
        known = true;
        break;
      }
    }
    if (!known) sums.emplace_back(words.back(), 0.0 + bias);
  }
}

// Adds to the last id of each sequence whose other ids are the latest tokens.
void bias_scores(Row& row) {
  sum_biases(row.sampling, row.context, row.sums);
  for (const auto& [id, sum] : row.sums) {
    const std::int64_t column = row.columns.find(id);
    if (column >= 0) row.scores[column] += sum;
  }
}

// Ids of prompt and reply, each once: score · p below zero, score / p else.
// Source: Keskar et al. 2019, arXiv:1909.05858, with the sign rule of transformers.
void penalise_repetition(Row& row) {
  const double p = row.sampling.repetition_penalty;
  row.tally.begin();
  for (std::size_t n = 0; n < row.context.length(); ++n) {
    const std::int64_t column = row.columns.find(row.context.at(n));
    if (column < 0 || row.tally.add(static_cast<std::size_t>(column)) > 0) continue;
    double& score = row.scores[column];
    score = score < 0 ? score * p : score / p;
  }
}

// Ids of the reply alone, c times in it: score - (c · frequency + presence).
// Source: the OpenAI API reference, "Frequency and presence penalties".
void penalise_presence(Row& row) {
  row.tally.begin();
  for (const std::int64_t id : row.context.tokens) {
    const std::int64_t column = row.columns.find(id);
    if (column >= 0) row.tally.add(static_cast<std::size_t>(column));
  }
  const double frequency = row.sampling.frequency_penalty;
  const double presence = row.sampling.presence_penalty;
  // A count is taken at an id's first mention, so every id is met once.
  for (std::size_t n = 0; n < row.context.tokens.size; ++n) {
    const std::int64_t column = row.columns.find(row.context.tokens[n]);
    if (column < 0) continue;
    const std::uint32_t count = row.tally.take(static_cast<std::size_t>(column));
    if (count > 0) row.scores[column] -= count * frequency + presence;
  }
}

}  // namespace headport::internal
