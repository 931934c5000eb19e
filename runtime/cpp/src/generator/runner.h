// Executes a bundle: token ids in, logits out, for rows that start and end apart from each other.
#pragma once

#include <cstddef>

#include "generator/candidate_head.h"
#include "span.h"

namespace headport::internal {

// Each row has a cache, and a place among the hidden states that the head is given.
class Runner {
 public:
  virtual ~Runner() = default;

  // Columns of the head.
  virtual std::size_t width() const = 0;
  // Make room for rows of up to `capacity` tokens each; forgets all rows where there was less.
  virtual void reserve(std::size_t rows, std::size_t capacity) = 0;
  // Forget a row, and run a prompt in it; the hidden state of its last token is its own.
  virtual void begin(std::size_t row, IdSpan tokens) = 0;
  // Append one token to each of the rows 0 … count - 1.
  virtual void step(const std::int64_t* tokens, std::size_t count) = 0;
  // Adds a vector [H] to the hidden state of a row's last token.
  // Errors: HEADPORT_NON_FINITE_ERROR if a sum is beyond the type of hidden states;
  // HEADPORT_UNSUPPORTED if they cannot be reached.
  virtual void add(std::size_t row, const float* vector);
  // Logits of the hidden states of rows 0 … count - 1, [count, width]; valid until the next call.
  // Only where `candidates` gives nothing.
  virtual const float* logits(std::size_t count) = 0;
  // The head, where it gives candidates; else null.
  virtual CandidateHead* candidates() { return nullptr; }
  // Make `target` hold the tokens of `source`.
  virtual void copy(std::size_t source, std::size_t target) = 0;
  // Let each of the rows 0 … N - 1 hold what row `sources[n]` held.
  virtual void reorder(RowSpan sources) = 0;
};

}  // namespace headport::internal
