// TensorRT itself, or TensorRT-RTX: the one whose headers this is built with. Both have these classes
// by the same names; what differs stands under TRT_MAJOR_RTX. Nothing of it is linked.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "error.h"
#include "tensorrt/engine.h"

namespace headport::internal {
namespace {

namespace nv = nvinfer1;

// The number in a library's name is that of its ABI, which is that of the headers.
#define HEADPORT_TEXT(number) #number
#define HEADPORT_NUMBERED(name, number) name HEADPORT_TEXT(number)
#ifdef TRT_MAJOR_RTX
constexpr const char* kBackend = "tensorrt-rtx";
constexpr const char* kLibrary = HEADPORT_NUMBERED("libtensorrt_rtx.so.", TRT_MAJOR_RTX);
constexpr int kMajor = TRT_MAJOR_RTX;
#else
constexpr const char* kBackend = "tensorrt";
constexpr const char* kLibrary = HEADPORT_NUMBERED("libnvinfer.so.", NV_TENSORRT_MAJOR);
constexpr int kMajor = NV_TENSORRT_MAJOR;
#endif

constexpr const char* kStripped = "STRIP_PLAN";  // flag of a plan without weights
constexpr const char* kCarriesCode = "VERSION_COMPATIBLE";

[[noreturn]] void refuse(const std::string& message) {
  throw Error(HEADPORT_LIBRARY_ERROR, message);
}

// Keeps the latest error. The library may call it from threads of its own, and keeps the first logger
// of a process for good.
class Logger final : public nv::ILogger {
 public:
  void log(Severity severity, const char* message) noexcept override {
    if (severity > Severity::kERROR) return;
    try {
      const std::lock_guard<std::mutex> lock(mutex_);
      latest_ = message;
    } catch (...) {  // no memory for a message
    }
  }
  std::string latest() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return latest_.empty() ? "it gives no reason" : latest_;
  }

 private:
  mutable std::mutex mutex_;
  std::string latest_;
};

Logger& logger() {
  static auto* const found = new Logger;  // never freed
  return *found;
}

std::string dtype_of(nv::DataType type) {
  switch (type) {
    case nv::DataType::kFLOAT: return "float";
    case nv::DataType::kHALF: return "float16";
    case nv::DataType::kBF16: return "bfloat16";
    case nv::DataType::kINT32: return "int32";
    case nv::DataType::kINT64: return "int64";
    case nv::DataType::kBOOL: return "bool";
    default: return text("type ", static_cast<int>(type), " of TensorRT");
  }
}

Shape shape_of(const nv::Dims& dims) {
  Shape found;
  for (int n = 0; n < dims.nbDims; ++n) found.push_back(dims.d[n]);
  return found;
}

class LibraryEngine final : public Engine {
 public:
  LibraryEngine(nv::IRuntime* runtime, const EngineRecord& record, const std::string& plan,
                Device& device, bool record_graphs)
      : runtime_(runtime), device_(device) {
    if (record.has_flag(kCarriesCode)) runtime_->setEngineHostCodeAllowed(true);
    engine_.reset(runtime_->deserializeCudaEngine(plan.data(), plan.size()));
    if (engine_ == nullptr) {
      refuse(text(record.plan, ": the library does not load it (", logger().latest(),
                  "); build it again: ", record.command));
    }
    open_context(record, record_graphs);
    if (context_ == nullptr) {
      refuse(text(record.plan, ": the library gives no execution context (", logger().latest(), ")"));
    }
  }

  std::vector<EnginePort> ports() const override {
    std::vector<EnginePort> found;
    for (int n = 0; n < engine_->getNbIOTensors(); ++n) {
      const char* name = engine_->getIOTensorName(n);
      found.push_back({name, engine_->getTensorIOMode(name) == nv::TensorIOMode::kINPUT,
                       dtype_of(engine_->getTensorDataType(name)),
                       shape_of(engine_->getTensorShape(name))});
    }
    return found;
  }

  std::vector<std::map<std::string, ShapeRange>> profiles() const override {
    std::vector<std::map<std::string, ShapeRange>> found;
    for (int n = 0; n < engine_->getNbOptimizationProfiles(); ++n) {
      auto& shapes = found.emplace_back();
      for (const EnginePort& port : ports()) {
        if (!port.input) continue;
        const char* name = port.name.c_str();
        shapes[port.name] = {
            shape_of(engine_->getProfileShape(name, n, nv::OptProfileSelector::kMIN)),
            shape_of(engine_->getProfileShape(name, n, nv::OptProfileSelector::kMAX))};
      }
    }
    return found;
  }

  bool use_profile(std::size_t index) override {
    return context_->setOptimizationProfileAsync(static_cast<int>(index), stream());
  }
  bool set_shape(const std::string& input, const Shape& shape) override {
    nv::Dims dims{};
    if (shape.size() > static_cast<std::size_t>(nv::Dims::MAX_DIMS)) return false;
    dims.nbDims = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), dims.d);
    return context_->setInputShape(input.c_str(), dims);
  }
  bool set_address(const std::string& port, void* address) override {
    return context_->setTensorAddress(port.c_str(), address);
  }
  Shape shape(const std::string& output) const override {
    return shape_of(context_->getTensorShape(output.c_str()));
  }
  bool run() override { return context_->enqueueV3(stream()); }
  std::string fault() const override { return logger().latest(); }

 private:
  cudaStream_t stream() const { return static_cast<cudaStream_t>(device_.stream()); }

#ifdef TRT_MAJOR_RTX
  void open_context(const EngineRecord& record, bool record_graphs) {
    if (!record_graphs) {
      context_.reset(engine_->createExecutionContext());
      return;
    }
    const std::unique_ptr<nv::IRuntimeConfig> config(engine_->createRuntimeConfig());
    if (config == nullptr ||
        !config->setCudaGraphStrategy(nv::CudaGraphStrategy::kWHOLE_GRAPH_CAPTURE)) {
      refuse(text(record.plan, ": the library records no CUDA graphs (", logger().latest(), ")"));
    }
    context_.reset(engine_->createExecutionContext(config.get()));
  }
#else
  void open_context(const EngineRecord&, bool) {
    context_.reset(engine_->createExecutionContext());
  }
#endif

  // In the order in which they are made: an engine must go before its runtime.
  std::unique_ptr<nv::IRuntime> runtime_;
  Device& device_;
  std::unique_ptr<nv::ICudaEngine> engine_;
  std::unique_ptr<nv::IExecutionContext> context_;
};

class LoadedLibrary final : public TensorRt {
 public:
  explicit LoadedLibrary(const std::string& path) {
    const char* named = std::getenv("HEADPORT_TENSORRT");
    path_ = !path.empty() ? path : named != nullptr && *named != '\0' ? named : kLibrary;
    // Never unloaded: it has threads and static objects of its own.
    handle_ = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) {
      const char* fault = dlerror();
      refuse(text(kBackend, "'s shared library was expected and could not be loaded (",
                  fault != nullptr ? fault : path_,
                  "); give its path, or set HEADPORT_TENSORRT to it"));
    }
    const int major = number("getInferLibMajorVersion");
    if (major != kMajor) {
      refuse(text(kBackend, " ", kMajor, " was expected, of which the headers are, ", path_, " is of ",
                  major, "; build this library with the headers of that version"));
    }
    version_ = text(major, ".", number("getInferLibMinorVersion"), ".",
                    number("getInferLibPatchVersion"), ".", number("getInferLibBuildVersion"));
    create_ = symbol<void*(void*, std::int32_t)>("createInferRuntime_INTERNAL");
  }

  std::string version() const override { return version_; }

  std::unique_ptr<Engine> open(const EngineRecord& record, const std::string& plan, Device& device,
                               bool record_graphs) override {
    if (record.has_flag(kStripped)) {
      throw Error(HEADPORT_UNSUPPORTED,
                  text(record.plan, " was built without weights, which this library does not put "
                       "into an engine; build it without --strip-weights, or run it with the Python "
                       "runtime"));
    }
#ifndef TRT_MAJOR_RTX
    if (record_graphs) {
      throw Error(HEADPORT_UNSUPPORTED, "cuda_graphs: of the two libraries TensorRT-RTX alone records "
                                        "CUDA graphs by itself, and this is built for TensorRT");
    }
#endif
    auto* runtime = static_cast<nv::IRuntime*>(create_(&logger(), NV_TENSORRT_VERSION));
    if (runtime == nullptr) {
      refuse(text(path_, ": the library does not start (", logger().latest(), ")"));
    }
    return std::make_unique<LibraryEngine>(runtime, record, plan, device, record_graphs);
  }

 private:
  template <typename Function>
  Function* symbol(const char* name) const {
    void* found = dlsym(handle_, name);
    if (found == nullptr) {
      refuse(text(kBackend, "'s shared library was expected, ", path_, " has no ", name));
    }
    return reinterpret_cast<Function*>(found);
  }
  int number(const char* name) const { return symbol<std::int32_t()>(name)(); }

  std::string path_;
  void* handle_ = nullptr;
  std::string version_;
  void* (*create_)(void* logger, std::int32_t version) = nullptr;
};

}  // namespace

void require_headers(const std::string& backend) {
  if (backend == kBackend) return;
  throw Error(HEADPORT_UNSUPPORTED,
              text("a plan of ", kBackend, " was expected, whose headers this library was built with; "
                   "one of ", backend, " was found; build the library with "
                   "-DTENSORRT_INCLUDE_DIR=FOLDER of that one's headers"));
}

std::unique_ptr<TensorRt> load_tensorrt(const std::string& backend, const std::string& path) {
  require_headers(backend);
  return std::make_unique<LoadedLibrary>(path);
}

}  // namespace headport::internal
