// A runner without ONNX Runtime: logits after a token are a row of a table, and so are hidden states.
#pragma once

#include <algorithm>
#include <vector>

#include "generator/runner.h"

namespace headport::test {

class TableRunner final : public internal::Runner {
 public:
  explicit TableRunner(std::vector<std::vector<float>> table) : table_(std::move(table)) {}

  std::size_t width() const override { return table_[0].size(); }
  void reserve(std::size_t rows, std::size_t) override {
    if (rows <= latest_.size()) return;
    latest_.resize(rows);
    added_.resize(rows);
    logits_.resize(rows * width());
  }
  void begin(std::size_t row, internal::IdSpan tokens) override {
    latest_[row] = tokens[tokens.size - 1];
    added_[row] = nullptr;
  }
  void step(const std::int64_t* tokens, std::size_t count) override {
    for (std::size_t row = 0; row < count; ++row) {
      latest_[row] = tokens[row];
      added_[row] = nullptr;
    }
  }
  void add(std::size_t row, const float* vector) override { added_[row] = vector; }
  const float* logits(std::size_t count) override {
    for (std::size_t row = 0; row < count; ++row) {
      const auto& found = table_[static_cast<std::size_t>(latest_[row]) % table_.size()];
      // One row of one table is handed out as it is: a benchmark does not time a copy.
      if (count == 1 && added_[0] == nullptr) return found.data();
      float* given = logits_.data() + row * width();
      std::copy(found.begin(), found.end(), given);
      for (std::size_t n = 0; added_[row] != nullptr && n < width(); ++n) given[n] += added_[row][n];
    }
    return logits_.data();
  }
  void copy(std::size_t source, std::size_t target) override { latest_[target] = latest_[source]; }
  void reorder(internal::RowSpan sources) override {
    const auto before = latest_;
    for (std::size_t row = 0; row < sources.size; ++row) latest_[row] = before[sources[row]];
  }

 private:
  std::vector<std::vector<float>> table_;
  std::vector<std::int64_t> latest_;
  std::vector<const float*> added_;  // by row, what its hidden state got
  std::vector<float> logits_;
};

}  // namespace headport::test
