#include "ort/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <vector>

#include "error.h"

namespace headport::internal {
namespace {

// The functions used here are all older. The table of functions only grows, so with an older
// version's table nothing behind its end may be called.
constexpr std::uint32_t kOldestApi = 17;

std::vector<std::string> candidates(const std::string& path) {
  if (!path.empty()) return {path};
  const char* named = std::getenv("HEADPORT_ORT");
  if (named != nullptr && *named != '\0') return {named};
  return {"libonnxruntime.so.1", "libonnxruntime.so"};
}

// Never unloaded: its threads and static objects may outlive every session.
void* open_any(const std::vector<std::string>& paths) {
  std::string faults;
  for (const std::string& path : paths) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) return handle;
    const char* fault = dlerror();
    faults += (faults.empty() ? "" : "; ") + std::string(fault != nullptr ? fault : path);
  }
  throw Error(HEADPORT_LIBRARY_ERROR,
              text("ONNX Runtime's shared library was expected and could not be loaded (", faults,
                   "); give its path, or set HEADPORT_ORT to it"));
}

}  // namespace

std::shared_ptr<Library> Library::load(const std::string& path) {
  void* handle = open_any(candidates(path));
  using GetBase = const OrtApiBase*(ORT_API_CALL*)();
  const auto get_base = reinterpret_cast<GetBase>(dlsym(handle, "OrtGetApiBase"));
  if (get_base == nullptr) {
    throw Error(HEADPORT_LIBRARY_ERROR,
                text("a shared library of ONNX Runtime was expected, ", path,
                     " does not export OrtGetApiBase; give the path of libonnxruntime.so"));
  }
  const OrtApiBase* base = get_base();
  std::shared_ptr<Library> found(new Library);
  found->version_ = base->GetVersionString();
  // A library writes to the terminal when it is asked for a version that it does not have, so its
  // own is worked out from its name, 1.N, and only then looked for downwards.
  std::uint32_t newest = ORT_API_VERSION;
  const std::size_t dot = found->version_.find('.');
  if (dot != std::string::npos) {
    const unsigned long minor = std::strtoul(found->version_.c_str() + dot + 1, nullptr, 10);
    found->release_ = static_cast<std::uint32_t>(minor);
    if (minor > 0 && minor < newest) newest = found->release_;
  }
  for (std::uint32_t version = newest; version >= kOldestApi; --version) {
    found->api_ = base->GetApi(version);
    found->api_version_ = version;
    if (found->api_ != nullptr) break;
  }
  if (found->api_ == nullptr) {
    throw Error(HEADPORT_LIBRARY_ERROR,
                text("ONNX Runtime with C API version ", kOldestApi,
                     " or newer was expected, release ", found->version_,
                     " was found; install a newer one"));
  }
  found->check(found->api_->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "headport", &found->env_),
               HEADPORT_LIBRARY_ERROR, "ONNX Runtime cannot start");
  return found;
}

Library::~Library() {
  if (env_ != nullptr) api_->ReleaseEnv(env_);
}

void Library::check(OrtStatus* status, headport_status kind, const std::string& what) const {
  if (status == nullptr) return;
  std::string message = api_->GetErrorMessage(status);
  api_->ReleaseStatus(status);
  throw Error(kind, text(what, ": ", message.substr(0, message.find('\n'))));
}

}  // namespace headport::internal
