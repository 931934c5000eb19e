// A stand-in for TensorRT, in main memory, and a runner without plans that gives the same logits: they
// depend on the sum and the number of all tokens of a row, which the plan keeps in its cache.
#pragma once

#include <cstdlib>
#include <cstring>
#include <set>

#include "bundle/ledger.h"
#include "generator/runner.h"
#include "gpu/device.h"
#include "tensorrt/engine.h"

namespace headport::test {

constexpr std::size_t kToySize = 37;  // of the vocabulary

// Quarters, so that float16 holds them.
inline float toy_logit(double sum, double count, std::size_t id) {
  const auto mixed = static_cast<std::size_t>(sum * 7.0 + count * 3.0) + id * id;
  return -static_cast<float>(mixed % 23) / 4.0f;
}

// What a test looks at while a runner owns the rest.
struct ToyState {
  std::set<void*> live;  // memory of the device
  std::size_t allocations = 0;
  std::size_t runs = 0;  // of the backbone
  bool refuses = false;  // the next run
};

class ToyDevice final : public internal::Device {
 public:
  explicit ToyDevice(ToyState& state) : state_(state) {}
  void* stream() const override { return nullptr; }
  void* allocate(std::size_t size) override {
    ++state_.allocations;
    return *state_.live.insert(std::malloc(size > 0 ? size : 1)).first;
  }
  void free(void* address) noexcept override {
    state_.live.erase(address);
    std::free(address);
  }
  void upload(void* to, const void* from, std::size_t size) override { std::memcpy(to, from, size); }
  void download(void* to, const void* from, std::size_t size) override {
    std::memcpy(to, from, size);
  }

 private:
  ToyState& state_;
};

class ToyEngine : public internal::Engine {
 public:
  ToyEngine(ToyState& state, std::string dtype) : state_(state), dtype_(std::move(dtype)) {}

  bool use_profile(std::size_t) override { return true; }
  bool set_shape(const std::string& input, const internal::Shape& shape) override {
    shapes_[input] = shape;
    return true;
  }
  bool set_address(const std::string& port, void* address) override {
    addresses_[port] = address;
    return true;
  }
  std::string fault() const override { return "toy fault"; }

 protected:
  double read(const std::string& port, std::size_t place) const {
    const auto* data = static_cast<const char*>(addresses_.at(port));
    if (dtype_ == "float") return loaded<float>(data, place);
    return internal::from_half(loaded<std::uint16_t>(data, place));
  }
  void write(const std::string& port, std::size_t place, double value) {
    auto* data = static_cast<char*>(addresses_.at(port));
    if (dtype_ == "float") return stored(data, place, static_cast<float>(value));
    stored(data, place, internal::to_half(value));
  }
  template <typename T>
  static T loaded(const char* data, std::size_t place) {
    T value;
    std::memcpy(&value, data + place * sizeof value, sizeof value);
    return value;
  }
  template <typename T>
  static void stored(char* data, std::size_t place, T value) {
    std::memcpy(data + place * sizeof value, &value, sizeof value);
  }

  ToyState& state_;
  std::string dtype_;
  std::map<std::string, internal::Shape> shapes_;
  std::map<std::string, void*> addresses_;
};

// One layer with keys alone, [1, 1, tokens, 1]; hidden states are [sum, count].
class ToyBackbone final : public ToyEngine {
 public:
  static constexpr const char* kPast = "past_key_values.0.key";
  using ToyEngine::ToyEngine;

  std::string ids = "int64";  // their element type

  std::vector<internal::EnginePort> ports() const override {
    return {{"present.0.key", false, dtype_, {-1, 1, -1, 1}},
            {"input_ids", true, ids, {-1, -1}},
            {"attention_mask", true, ids, {-1, -1}},
            {kPast, true, dtype_, {-1, 1, -1, 1}},
            {"hidden_states", false, dtype_, {-1, -1, 2}}};
  }
  // Prompts in steps of 2 to 6 behind up to 8 tokens, then single tokens behind up to 30.
  std::vector<std::map<std::string, internal::ShapeRange>> profiles() const override {
    return {{{"input_ids", {{1, 2}, {2, 6}}},
             {"attention_mask", {{1, 2}, {2, 14}}},
             {kPast, {{1, 1, 0, 1}, {2, 1, 8, 1}}}},
            {{"input_ids", {{1, 1}, {2, 1}}},
             {"attention_mask", {{1, 1}, {2, 31}}},
             {kPast, {{1, 1, 0, 1}, {2, 1, 30, 1}}}}};
  }
  internal::Shape shape(const std::string& output) const override {
    const std::int64_t length = shapes_.at("input_ids")[1], past = shapes_.at(kPast)[2];
    if (output == "hidden_states") return {1, length, 2};
    return {1, 1, past + length, 1};
  }
  bool run() override {
    if (std::exchange(state_.refuses, false)) return false;
    ++state_.runs;
    const auto length = static_cast<std::size_t>(shapes_.at("input_ids")[1]);
    const auto past = static_cast<std::size_t>(shapes_.at(kPast)[2]);
    if (shapes_.at("attention_mask") != internal::Shape{1, shapes_.at(kPast)[2] +
                                                               shapes_.at("input_ids")[1]}) {
      return false;
    }
    double sum = 0.0;
    for (std::size_t n = 0; n < past + length; ++n) {
      if (number("attention_mask", n) != 1) return false;
      const double key = n < past ? read(kPast, n)
                                  : static_cast<double>(number("input_ids", n - past));
      sum += key;
      write("present.0.key", n, key);
      if (n < past) continue;
      write("hidden_states", 2 * (n - past), sum);
      write("hidden_states", 2 * (n - past) + 1, static_cast<double>(n + 1));
    }
    return true;
  }

 private:
  std::int64_t number(const std::string& port, std::size_t place) const {
    const auto* data = static_cast<const char*>(addresses_.at(port));
    return ids == "int64" ? loaded<std::int64_t>(data, place) : loaded<std::int32_t>(data, place);
  }
};

// Up to two rows at once; what `top_ids` stand for, nobody asks.
class ToyHead final : public ToyEngine {
 public:
  using ToyEngine::ToyEngine;

  std::vector<internal::EnginePort> ports() const override {
    return {{"top_ids", false, "int64", {-1, 1}},
            {"logits", false, dtype_, {-1, static_cast<std::int64_t>(kToySize)}},
            {"hidden_states", true, dtype_, {-1, 2}}};
  }
  std::vector<std::map<std::string, internal::ShapeRange>> profiles() const override {
    return {{{"hidden_states", {{1, 2}, {2, 2}}}}};
  }
  internal::Shape shape(const std::string& output) const override {
    const std::int64_t rows = shapes_.at("hidden_states")[0];
    return {rows, output == "logits" ? static_cast<std::int64_t>(kToySize) : 1};
  }
  bool run() override {
    for (std::size_t row = 0; row < static_cast<std::size_t>(shapes_.at("hidden_states")[0]); ++row) {
      const double sum = read("hidden_states", 2 * row), count = read("hidden_states", 2 * row + 1);
      for (std::size_t id = 0; id < kToySize; ++id) {
        write("logits", row * kToySize + id, toy_logit(sum, count, id));
      }
    }
    return true;
  }
};

}  // namespace headport::test
