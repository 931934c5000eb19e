// ONNX Runtime, loaded at run time. Linking against it would tie a program to one release: its one
// exported symbol carries the release's version.
#pragma once

#include <onnxruntime_c_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "headport/headport.h"

namespace headport::internal {

class Library {
 public:
  // `path` may be empty: then $HEADPORT_ORT, else what the system finds by the library's name.
  // Errors: HEADPORT_LIBRARY_ERROR if there is none, it is no ONNX Runtime, or is too old.
  static std::shared_ptr<Library> load(const std::string& path);

  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  ~Library();

  const OrtApi& api() const { return *api_; }
  std::uint32_t api_version() const { return api_version_; }
  const std::string& version() const { return version_; }
  // N of release 1.N; 0 where the name says none.
  std::uint32_t release() const { return release_; }
  const OrtEnv* env() const { return env_; }

  // Frees a status of the C API; throws its message where it is one of a failure.
  void check(OrtStatus* status, headport_status kind, const std::string& what) const;

 private:
  Library() = default;

  const OrtApi* api_ = nullptr;
  std::uint32_t api_version_ = 0;
  std::string version_;
  std::uint32_t release_ = 0;
  OrtEnv* env_ = nullptr;
};

}  // namespace headport::internal
