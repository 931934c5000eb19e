// Runs bundles that were lowered to `ort-cpu`: GroupQueryAttention that writes into right-padded
// caches in place. Mirrors headport.runner.InPlaceRunner.
#pragma once

#include <memory>
#include <vector>

#include "bundle/bundle.h"
#include "generator/head_session.h"
#include "generator/runner.h"
#include "ort/session.h"

namespace headport::internal {

class InPlaceRunner final : public Runner {
 public:
  // Errors: HEADPORT_UNSUPPORTED if the bundle is of another target or form; HEADPORT_BUNDLE_ERROR
  // if a graph is not what the manifest says.
  InPlaceRunner(std::shared_ptr<Library> library, const Bundle& bundle, const std::string& head,
                Threads threads);

  // The head by itself. What it is given to use lasts until `reserve`.
  HeadSession& head() { return *head_; }
  std::size_t width() const override { return head_->width(); }
  void reserve(std::size_t rows, std::size_t capacity) override;
  void begin(std::size_t row, IdSpan tokens) override;
  void step(const std::int64_t* tokens, std::size_t count) override;
  void add(std::size_t row, const float* vector) override;
  const float* logits(std::size_t count) override { return head_->logits(count); }
  CandidateHead* candidates() override {
    return head_->gives_candidates() ? head_.get() : nullptr;
  }
  void copy(std::size_t source, std::size_t target) override;
  void reorder(RowSpan sources) override;

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  // Keys or values of one layer, [rows, KV, slots, D].
  struct Cache {
    std::string past;
    std::string present;
    std::string dtype;
    std::int64_t heads = 0;
    std::int64_t width = 0;
    std::size_t row_bytes = 0;
    std::unique_ptr<char, Free> data;
  };

  void read_ports(const Bundle& bundle, const Graph& backbone);
  // Bytes of one key-value head of a row that hold its tokens.
  std::size_t held_bytes(const Cache& cache, std::size_t row) const;
  // Binds rows first … first + count - 1 for runs of `length` tokens each.
  std::unique_ptr<Binding> bind(std::size_t first, std::size_t count, std::int64_t* ids,
                                std::size_t length, char* hidden);
  char* hidden_of(std::size_t row) { return hidden_.data() + row * hidden_bytes_; }

  std::unique_ptr<Session> backbone_;
  std::unique_ptr<HeadSession> head_;
  std::vector<Cache> caches_;
  std::size_t hidden_size_ = 0;
  std::size_t hidden_bytes_ = 0;  // of one token
  std::string hidden_dtype_;
  bool ragged_ = false;  // the backbone takes query_seqlens, else position_ids

  std::size_t rows_ = 0;
  std::size_t capacity_ = 0;
  std::int32_t slots_ = 0;
  std::int32_t total_sequence_length_ = 0;     // of a step: all slots, or the longest row's tokens
  std::vector<std::int64_t> ids_;              // [rows]
  std::vector<std::int32_t> seqlens_k_;        // [rows]
  std::vector<std::int32_t> query_seqlens_;    // [rows]
  std::vector<std::int64_t> position_ids_;     // of a step, [rows] or [tokens of a chunk]
  std::vector<std::size_t> lengths_;           // [rows]
  std::vector<char> hidden_;                   // [rows, H]
  std::vector<char> spare_;                    // of one cache, for rows that are moved
  std::vector<std::size_t> old_lengths_;       // [rows]
  std::vector<std::unique_ptr<Binding>> steps_;  // by rows - 1, bound once
};

}  // namespace headport::internal
