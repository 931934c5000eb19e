// One plan, opened: device memory in, device memory out. Element types and the profile that fits come
// from the engine itself, never from the bundle. Mirrors runtime/tensorrt/plan.py.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "tensorrt/engine.h"

namespace headport::internal {

// A dense array on the device.
struct OnDevice {
  void* address = nullptr;
  Shape shape;
};

// Bytes of a dense array. Errors: HEADPORT_UNSUPPORTED if this library has no use for the type.
std::size_t array_bytes(const Shape& shape, const std::string& dtype);

class Plan {
 public:
  // Where an output goes: memory for an array of this shape, or null for memory of the plan's own.
  using Place = std::function<void*(const std::string& output, const Shape& shape)>;
  using Shapes = std::map<std::string, Shape>;

  // `file` names the plan in messages.
  Plan(std::string file, std::unique_ptr<Engine> engine, Device& device);

  // Errors of both: HEADPORT_BUNDLE_ERROR if there is no such port.
  const EnginePort& input(const std::string& name) const { return port(name, true); }
  const EnginePort& output(const std::string& name) const { return port(name, false); }
  std::vector<std::string> names(bool input) const;
  const std::string& file() const { return file_; }

  // Whether some profile takes these shapes.
  bool fits(const Shapes& shapes) const { return profile_of(shapes) < profiles_.size(); }
  // The largest size of an input's dimension among the profiles that take `shapes`, of which that
  // input's dimension is left out; 0 where none does.
  std::int64_t largest(const std::string& name, std::size_t dimension, const Shapes& shapes) const;

  // Memory of the plan's own for an input, with this array in it. Integers are narrowed or widened to
  // what the engine takes.
  OnDevice upload(const std::string& input, const void* data, Shape shape);
  OnDevice upload_ids(const std::string& input, const std::vector<std::int64_t>& ids, Shape shape);
  // Runs once. Errors: HEADPORT_LIBRARY_ERROR if no profile takes the shapes, or the library refuses.
  std::map<std::string, OnDevice> run(const std::map<std::string, OnDevice>& feeds,
                                      const Place& place);

 private:
  struct Memory {
    std::shared_ptr<void> block;
    std::size_t size = 0;
  };

  const EnginePort& port(const std::string& name, bool input) const;
  std::size_t profile_of(const Shapes& shapes) const;
  void* own(const std::string& port, std::size_t bytes);
  [[noreturn]] void refuse(const std::string& what) const;

  std::string file_;
  Device& device_;
  std::map<std::string, Memory> memory_;  // before the engine, which must go first
  std::unique_ptr<Engine> engine_;
  std::vector<EnginePort> ports_;
  std::vector<std::map<std::string, ShapeRange>> profiles_;
  std::size_t profile_ = 0;
};

}  // namespace headport::internal
