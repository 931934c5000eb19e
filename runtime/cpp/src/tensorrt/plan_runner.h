// The runner of plans: rows of a batch run one after the other, with growing caches that stay on the
// device. Mirrors runtime/tensorrt/runner.py.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bundle/bundle.h"
#include "generator/runner.h"
#include "gpu/device.h"
#include "tensorrt/plan.h"

namespace headport::internal {

class PlanRunner final : public Runner {
 public:
  // Errors: HEADPORT_UNSUPPORTED or HEADPORT_BUNDLE_ERROR if the plans are not of a form that is known.
  PlanRunner(std::unique_ptr<Device> device, std::unique_ptr<Plan> backbone,
             std::unique_ptr<Plan> head);

  // Tokens that a row may have, by the profiles of the backbone's plan.
  std::int64_t max_context() const { return max_context_; }
  std::size_t width() const override { return width_; }
  void reserve(std::size_t rows, std::size_t capacity) override;
  void begin(std::size_t row, IdSpan tokens) override;
  void step(const std::int64_t* tokens, std::size_t count) override;
  const float* logits(std::size_t count) override;
  void copy(std::size_t source, std::size_t target) override;
  void reorder(RowSpan sources) override;

 private:
  // Keys or values of one layer, [1, KV, tokens, D]. Every run writes new ones, so that rows may share
  // the old ones.
  struct Cache {
    std::string past;
    std::string present;
    std::int64_t heads = 0;
    std::int64_t width = 0;
    std::size_t token_bytes = 0;
    std::unique_ptr<BlockPool> pool;
  };
  struct Row {
    std::size_t length = 0;
    std::vector<BlockPool::Block> caches;
  };

  void read_caches();
  void read_sizes();
  std::size_t longest_step(std::size_t past, std::size_t left) const;
  void append(std::size_t row, const std::int64_t* tokens, std::size_t count);
  void convert_logits(const char* found, std::size_t count, float* to) const;

  std::unique_ptr<Device> device_;  // first, and so the last to go
  std::unique_ptr<Plan> backbone_;
  std::unique_ptr<Plan> head_;
  std::vector<Cache> caches_;
  std::int64_t max_context_ = 0;
  std::size_t width_ = 0;
  std::size_t hidden_size_ = 0;
  std::size_t hidden_bytes_ = 0;  // of one token

  std::size_t capacity_ = 0;
  std::vector<Row> rows_;  // after the pools of `caches_`, whose blocks they hold
  std::vector<Row> old_rows_;
  std::vector<char> hidden_;   // [rows, H]
  std::vector<char> found_;    // what a head gave
  std::vector<float> logits_;  // [rows, width]
};

}  // namespace headport::internal
