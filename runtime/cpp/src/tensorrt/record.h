// Build records of TensorRT plans, and what must hold before a plan is touched: it is this bundle's,
// and this machine can run it. Mirrors src/headport/engines.py and runtime/tensorrt/guard.py.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "bundle/bundle.h"
#include "gpu/driver.h"

namespace headport::internal {

// `engines/<graph>.json`: what of it this library acts on.
struct EngineRecord {
  std::string graph;
  std::string plan;  // file in the bundle
  std::string plan_sha256;
  std::string bundle_sha256;  // `bundle_digest` of what it was made from
  std::string graph_sha256;
  std::string backend;
  std::string backend_version;
  std::vector<std::string> compute_capabilities;  // empty: the backend's own choice
  std::vector<std::string> flags;                 // of the builder
  std::string command;                            // that builds it again

  bool has_flag(const std::string& name) const;
};

// sha256 over the graphs and tensors that decide a bundle's answers, by name and checksum.
std::string bundle_digest(const Manifest& manifest);

// Graph name → record. Errors: HEADPORT_BUNDLE_ERROR if one cannot be read.
std::map<std::string, EngineRecord> read_engines(const Bundle& bundle);

// Errors: HEADPORT_BUNDLE_ERROR if the plan was made from another bundle, or is another plan.
void require_own(const Bundle& bundle, const EngineRecord& record);

// Errors: HEADPORT_NO_GPU if it was built for other GPUs.
void require_gpu(const EngineRecord& record, const Gpu& gpu);

// `version` is that of the library that is loaded.
// Errors: HEADPORT_LIBRARY_ERROR if the plan belongs to another one.
void require_version(const EngineRecord& record, const std::string& version);

}  // namespace headport::internal
