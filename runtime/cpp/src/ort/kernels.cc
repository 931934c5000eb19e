#include "ort/kernels.h"

#include <dlfcn.h>

#include <cstdlib>

#include "error.h"

namespace headport::internal {
namespace {

constexpr int kVersion = 4;
constexpr const char* kBuild =
    "; build it with `make kernels` and give its path in HEADPORT_KERNELS";

// Asked before ONNX Runtime loads it, whose messages do not say what was expected. The library stays
// loaded: its domain may outlive every session.
int version_of(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* found = handle == nullptr ? nullptr : dlsym(handle, "headport_kernels_version");
  if (found == nullptr) {
    const char* fault = dlerror();
    throw Error(HEADPORT_LIBRARY_ERROR, text(path, ": not a library of headport's kernels (",
                                             fault != nullptr ? fault : "", ")", kBuild));
  }
  return reinterpret_cast<int (*)()>(found)();
}

}  // namespace

void register_kernels(const Library& library, OrtSessionOptions* settings,
                      const std::map<std::string, std::string>& options) {
  const auto wanted = options.find(kKernelsOption);
  if (wanted == options.end()) return;
  if (wanted->second != std::to_string(kVersion)) {
    throw Error(HEADPORT_UNSUPPORTED,
                text("the bundle needs headport's kernels of version ", wanted->second,
                     ", this library knows ", kVersion, "; lower its portable bundle again"));
  }
  const char* named = std::getenv("HEADPORT_KERNELS");
  if (named == nullptr || *named == '\0') {
    throw Error(HEADPORT_LIBRARY_ERROR,
                text("the bundle was lowered with --kernels and needs that library, which was not "
                     "given", kBuild));
  }
  const int found = version_of(named);
  if (found != kVersion) {
    throw Error(HEADPORT_LIBRARY_ERROR, text(named, ": kernels of version ", kVersion,
                                             " were expected, ", found, " were found", kBuild));
  }
  library.check(library.api().RegisterCustomOpsLibrary_V2(settings, named), HEADPORT_LIBRARY_ERROR,
                text(named, ": ONNX Runtime cannot register it"));
}

}  // namespace headport::internal
