// `condition.safetensors`: what turns a condition into what hidden states get added. Mirrors
// src/headport/condition.py.
//
//     logits = head(hidden state + W c + b)
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bundle/bundle.h"
#include "span.h"

namespace headport::internal {

// A projection, and the vectors of its stored conditions as far as they were asked for. Not for
// several threads at once.
class Conditions {
 public:
  // `data` is the whole file, `where` names it in messages, `hidden_size` is the model's.
  // Errors: HEADPORT_BUNDLE_ERROR if it cannot be read, its tensors do not fit together or the model,
  // or are not finite; HEADPORT_UNSUPPORTED if one is not float32.
  Conditions(const std::string& data, const std::string& where, std::int64_t hidden_size);
  // Nothing where a bundle's model takes no condition. Errors: as above.
  static std::optional<Conditions> from_bundle(const Bundle& bundle);

  std::size_t size() const { return size_; }            // C, values of a condition
  std::vector<std::string> names() const;               // of those that are stored
  std::int64_t computed() const { return computed_; }   // products that were taken

  // Errors of both: HEADPORT_REQUEST_ERROR, naming what is known.
  void require_name(const std::string& name) const;
  void require_values(Span<float> values) const;
  // What hidden states get added, [H]. That of a stored one is kept, and never moves.
  const std::vector<float>& vector(const std::string& name);
  std::vector<float> vector(Span<float> values);

 private:
  std::vector<float> product(const float* values);
  std::string known() const;

  std::size_t size_ = 0, hidden_size_ = 0;
  std::vector<float> weight_;  // [H, C]
  std::vector<float> bias_;    // [H]
  std::map<std::string, std::vector<float>> stored_;   // [C] each
  std::map<std::string, std::vector<float>> vectors_;  // [H] each
  std::int64_t computed_ = 0;
};

}  // namespace headport::internal
