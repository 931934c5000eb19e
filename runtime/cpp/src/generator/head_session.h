// A head of a bundle on ONNX Runtime: all logits, or candidates scored with the original weight.
// Mirrors headport.heads.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bundle/bundle.h"
#include "generator/candidate_head.h"
#include "ort/session.h"

namespace headport::internal {

class HeadSession final : public CandidateHead {
 public:
  // Errors: HEADPORT_BUNDLE_ERROR if there is no such head, or a graph is not what the manifest
  // says.
  HeadSession(std::shared_ptr<Library> library, const Bundle& bundle, const std::string& name,
              Threads threads);

  bool gives_candidates() const { return entry_.candidates.has_value(); }
  const std::string& hidden_dtype() const { return hidden_dtype_; }
  std::size_t hidden_size() const { return hidden_size_; }
  // Where the runner keeps hidden states, [rows, H], and how many rows there are at most. They must
  // stay until the next call.
  void use(const char* hidden, std::size_t rows);

  // Of a head that gives logits: those of rows 0 … count - 1, [count, width].
  const float* logits(std::size_t count);

  bool certified() const override { return entry_.candidates->certified; }
  bool has_softcap() const override { return entry_.softcap.has_value(); }
  std::size_t width() const override { return width_; }
  Candidates pick(RowSpan rows, const float* noise) override;
  QuantisedLogits quantised(std::size_t row) override;
  const float* full(RowSpan rows) override;
  const float* rescored(RowSpan rows) override;

 private:
  enum class Wanted { kCandidates, kSteered, kQuantised, kRescored, kFull };
  // Buffers for up to `slice` rows, and bindings by what is wanted and how many rows there are.
  struct Buffers {
    std::vector<char> hidden;          // [slice, H]
    std::vector<float> noise;          // [slice, width], and [1] of no noise
    std::vector<std::int64_t> ids;     // [slice, M]
    std::vector<double> values;        // [slice, M]
    std::vector<std::int64_t> proved;  // [slice]
    std::vector<double> cut, error;    // [slice]
    std::vector<float> logits;         // [slice, width]
    std::vector<float> upper;          // [1, width]
  };

  void read_ports(const Bundle& bundle, const std::string& name);
  void open_full();
  void run(Wanted wanted, const std::size_t* rows, std::size_t count);
  std::unique_ptr<Binding> bind(Wanted wanted, std::size_t count);

  std::shared_ptr<Library> library_;
  Bundle bundle_;
  Threads threads_;
  Head entry_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Session> full_;  // opened when first needed: it holds the whole weight
  std::size_t width_ = 0;
  std::size_t hidden_size_ = 0;
  std::size_t hidden_bytes_ = 0;  // of one token
  std::string hidden_dtype_;

  const char* hidden_ = nullptr;
  std::size_t slice_ = 0;
  Buffers buffers_;
  std::map<std::pair<Wanted, std::size_t>, std::unique_ptr<Binding>> bindings_;
  std::vector<std::unique_ptr<Binding>> direct_;  // of `logits`, by rows - 1
  std::vector<float> all_;                        // [rows, width]
  // Of all rows of a call.
  std::vector<std::int64_t> ids_, proved_;
  std::vector<double> values_, cut_, error_;
};

}  // namespace headport::internal
