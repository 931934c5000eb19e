// The bundle: a folder with a manifest. Opened with the checks that Python makes.
#pragma once

#include <filesystem>
#include <string>

#include "bundle/manifest.h"

namespace headport::internal {

class Bundle {
 public:
  // Errors: HEADPORT_BUNDLE_ERROR if the folder is no bundle, its schema version is unknown, or a
  // file is missing, changed, a symbolic link, or lies outside the bundle. `verify` compares the
  // checksum of every file; else presence and size are.
  static Bundle open(const std::string& path, bool verify);

  const Manifest& manifest() const { return manifest_; }
  const std::filesystem::path& path() const { return path_; }
  // Errors: HEADPORT_BUNDLE_ERROR if the manifest does not list the file.
  std::filesystem::path file(const std::string& name) const;

 private:
  Bundle(std::filesystem::path path, Manifest manifest)
      : path_(std::move(path)), manifest_(std::move(manifest)) {}
  void check(bool verify) const;

  std::filesystem::path path_;
  Manifest manifest_;
};

// All of a file. Errors: HEADPORT_BUNDLE_ERROR if it cannot be read or is above a limit of bytes.
std::string read_file(const std::filesystem::path& path, std::uintmax_t limit);

}  // namespace headport::internal
