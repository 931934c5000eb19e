#include "ort/session.h"

#include <filesystem>

#include "error.h"
#include "ort/kernels.h"

namespace headport::internal {
namespace {

// Threads wait for the next operator by spinning. ONNX Runtime's default also spins through the gaps
// between runs, where backbone and head take the cores from each other; src/headport/session.py has
// the same entries.
constexpr const char* kSpinning[] = {"session.intra_op.spin_duration_us", "100"};
constexpr const char* kNotSpinning[] = {"session.intra_op.allow_spinning", "0"};

struct ElementType {
  const char* name;  // as a manifest has it
  ONNXTensorElementDataType type;
  std::size_t bytes;
};

constexpr ElementType kElementTypes[] = {
    {"double", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 8},
    {"float", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4},
    {"float16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2},
    {"int32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, 4},
    {"int64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8},
};

const ElementType& element_type(const std::string& dtype) {
  for (const ElementType& each : kElementTypes) {
    if (dtype == each.name) return each;
  }
  throw Error(HEADPORT_UNSUPPORTED,
              text("float, float16, double, int32 or int64 was expected as the type of a graph's port, ",
                   dtype, " was found; run this bundle with the Python runtime"));
}

// A handle of the C API that is freed on every way out.
template <typename T>
struct Handle {
  T* handle = nullptr;
  void(ORT_API_CALL* release)(T*);
  ~Handle() {
    if (handle != nullptr) release(handle);
  }
};

}  // namespace

std::size_t element_bytes(const std::string& dtype) { return element_type(dtype).bytes; }

Session::Session(std::shared_ptr<Library> library, const std::string& file,
                 const std::map<std::string, std::string>& options, Threads threads)
    : library_(std::move(library)), file_(std::filesystem::path(file).filename().string()) {
  const OrtApi& api = library_->api();
  const auto check = [&](OrtStatus* status) {
    library_->check(status, HEADPORT_BUNDLE_ERROR,
                    text(file_, ": ONNX Runtime ", library_->version(), " cannot load it"));
  };
  Handle<OrtSessionOptions> settings{nullptr, api.ReleaseSessionOptions};
  check(api.CreateSessionOptions(&settings.handle));
  check(api.SetSessionLogSeverityLevel(settings.handle, ORT_LOGGING_LEVEL_ERROR));
  check(api.SetIntraOpNumThreads(settings.handle, threads.count));
  check(api.SetInterOpNumThreads(settings.handle, 1));
  check(api.SetSessionGraphOptimizationLevel(settings.handle, ORT_ENABLE_ALL));
  register_kernels(*library_, settings.handle, options);
  auto entries = options;
  entries.erase(kKernelsOption);
  const auto& waiting = threads.spinning ? kSpinning : kNotSpinning;
  entries.emplace(waiting[0], waiting[1]);
  for (const auto& [key, value] : entries) {
    check(api.AddSessionConfigEntry(settings.handle, key.c_str(), value.c_str()));
  }
  check(api.CreateSession(library_->env(), file.c_str(), settings.handle, &session_));
  try {
    inputs_ = names(true);
    outputs_ = names(false);
  } catch (...) {
    api.ReleaseSession(session_);  // the destructor does not run for what was not constructed
    throw;
  }
}

Session::~Session() { library_->api().ReleaseSession(session_); }

std::vector<std::string> Session::names(bool input) const {
  const OrtApi& api = library_->api();
  const auto check = [&](OrtStatus* status) {
    library_->check(status, HEADPORT_LIBRARY_ERROR, file_ + ": its ports cannot be read");
  };
  OrtAllocator* allocator = nullptr;
  check(api.GetAllocatorWithDefaultOptions(&allocator));
  std::size_t count = 0;
  check(input ? api.SessionGetInputCount(session_, &count)
              : api.SessionGetOutputCount(session_, &count));
  std::vector<std::string> found;
  for (std::size_t n = 0; n < count; ++n) {
    char* name = nullptr;
    check(input ? api.SessionGetInputName(session_, n, allocator, &name)
                : api.SessionGetOutputName(session_, n, allocator, &name));
    found.emplace_back(name);
    allocator->Free(allocator, name);
  }
  return found;
}

Binding::Binding(Session& session) : session_(session) {
  const Library& library = *session.library_;
  const OrtApi& api = library.api();
  const auto check = [&](OrtStatus* status) {
    library.check(status, HEADPORT_LIBRARY_ERROR, session.file_ + ": buffers cannot be bound");
  };
  Handle<OrtIoBinding> binding{nullptr, api.ReleaseIoBinding};
  Handle<OrtMemoryInfo> memory{nullptr, api.ReleaseMemoryInfo};
  check(api.CreateIoBinding(session.session_, &binding.handle));
  check(api.CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &memory.handle));
  check(api.CreateRunOptions(&run_options_));
  std::swap(binding_, binding.handle);
  std::swap(memory_, memory.handle);
}

Binding::~Binding() {
  const OrtApi& api = session_.library_->api();
  api.ReleaseIoBinding(binding_);
  for (OrtValue* each : values_) api.ReleaseValue(each);
  api.ReleaseMemoryInfo(memory_);
  api.ReleaseRunOptions(run_options_);
}

OrtValue* Binding::value(void* data, const std::vector<std::int64_t>& shape,
                         const std::string& dtype) {
  const ElementType& type = element_type(dtype);
  std::size_t bytes = type.bytes;
  for (const std::int64_t dimension : shape) bytes *= static_cast<std::size_t>(dimension);
  values_.push_back(nullptr);
  session_.library_->check(
      session_.library_->api().CreateTensorWithDataAsOrtValue(
          memory_, data, bytes, shape.data(), shape.size(), type.type, &values_.back()),
      HEADPORT_LIBRARY_ERROR, session_.file_ + ": a buffer cannot be bound");
  return values_.back();
}

void Binding::input(const std::string& name, void* data, const std::vector<std::int64_t>& shape,
                    const std::string& dtype) {
  const Library& library = *session_.library_;
  library.check(library.api().BindInput(binding_, name.c_str(), value(data, shape, dtype)),
                HEADPORT_LIBRARY_ERROR, text(session_.file_, ": input ", name));
}

void Binding::output(const std::string& name, void* data, const std::vector<std::int64_t>& shape,
                     const std::string& dtype) {
  const Library& library = *session_.library_;
  library.check(library.api().BindOutput(binding_, name.c_str(), value(data, shape, dtype)),
                HEADPORT_LIBRARY_ERROR, text(session_.file_, ": output ", name));
}

void Binding::run() {
  const Library& library = *session_.library_;
  library.check(library.api().RunWithBinding(session_.session_, run_options_, binding_),
                HEADPORT_LIBRARY_ERROR, session_.file_ + ": a run failed");
}

}  // namespace headport::internal
