// A TensorRT engine with its execution context, by what a plan asks of it. With TensorRT's headers it
// is the library's; tests have a stand-in.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "tensorrt/record.h"

namespace headport::internal {

using Shape = std::vector<std::int64_t>;

// Shapes of an input that a profile takes, dimension by dimension.
struct ShapeRange {
  Shape smallest, largest;
};

struct EnginePort {
  std::string name;
  bool input = false;
  std::string dtype;  // as manifests write it: float, float16, int64 …
  Shape shape;        // -1 where a profile gives the size
};

class Engine {
 public:
  virtual ~Engine() = default;

  virtual std::vector<EnginePort> ports() const = 0;
  // By profile: input → shapes.
  virtual std::vector<std::map<std::string, ShapeRange>> profiles() const = 0;
  // False where the library refuses.
  virtual bool use_profile(std::size_t index) = 0;
  virtual bool set_shape(const std::string& input, const Shape& shape) = 0;
  virtual bool set_address(const std::string& port, void* address) = 0;
  // Of an output, once the shapes of all inputs are set.
  virtual Shape shape(const std::string& output) const = 0;
  virtual bool run() = 0;
  // What the library said last of an error; may be empty.
  virtual std::string fault() const = 0;
};

// The library that loads plans.
class TensorRt {
 public:
  virtual ~TensorRt() = default;

  virtual std::string version() const = 0;
  // `plan` is the file's bytes. Errors: HEADPORT_LIBRARY_ERROR if it is not loaded.
  virtual std::unique_ptr<Engine> open(const EngineRecord& record, const std::string& plan,
                                       Device& device, bool record_graphs) = 0;
};

// Refuses what this build cannot run, before anything is asked of a machine.
// Errors: HEADPORT_UNSUPPORTED if it was built without TensorRT's headers, or with those of another
// library than `backend`.
void require_headers(const std::string& backend);

// Loads the library; makes no object of it. `path` may be empty: then $HEADPORT_TENSORRT, else what the
// system finds by the library's name.
// Errors: as `require_headers`; HEADPORT_LIBRARY_ERROR.
std::unique_ptr<TensorRt> load_tensorrt(const std::string& backend, const std::string& path);

}  // namespace headport::internal
