#include "tensorrt/record.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "bundle/json.h"
#include "bundle/sha256.h"
#include "error.h"

namespace headport::internal {
namespace {

using nlohmann::json;

constexpr const char* kFolder = "engines/";
constexpr const char* kSuffix = ".json";
constexpr std::uintmax_t kRecordBytes = std::uintmax_t{64} << 20;
constexpr int kVersion = 1;
constexpr const char* kCarriesCode = "VERSION_COMPATIBLE";  // flag of a plan that later versions load

bool is_record(const std::string& name) {
  const std::string suffix = kSuffix;
  return name.rfind(kFolder, 0) == 0 && name.size() > suffix.size() &&
         name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
}

EngineRecord record_of(const json& value, const std::string& where) {
  EngineRecord found;
  try {
    const json version = value.at("schema_version");
    found.command = value.at("command");
    if (version != kVersion) {
      throw Error(HEADPORT_BUNDLE_ERROR,
                  text(where, ": build record version ", kVersion, " was expected, ", version.dump(),
                       " was found; build it again: ", found.command));
    }
    const std::pair<const char*, std::string*> texts[] = {
        {"graph", &found.graph},           {"plan", &found.plan},
        {"plan_sha256", &found.plan_sha256}, {"bundle_sha256", &found.bundle_sha256},
        {"graph_sha256", &found.graph_sha256}, {"backend", &found.backend},
        {"backend_version", &found.backend_version}};
    for (const auto& [name, field] : texts) *field = value.at(name).get<std::string>();
    found.compute_capabilities =
        value.at("compute_capabilities").get<std::vector<std::string>>();
    found.flags = value.at("flags").get<std::vector<std::string>>();
  } catch (const json::exception& error) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(where, ": not a build record that is known here (", error.what(), ")"));
  }
  return found;
}

std::string shortened(const std::string& digest) { return digest.substr(0, 16) + "…"; }

}  // namespace

bool EngineRecord::has_flag(const std::string& name) const {
  return std::find(flags.begin(), flags.end(), name) != flags.end();
}

std::string bundle_digest(const Manifest& manifest) {
  std::set<std::string> names;
  for (const auto& [_, graph] : manifest.graphs) names.insert(graph.file);
  for (const Tensor& tensor : manifest.tensors) names.insert(tensor.file);
  Sha256 digest;
  for (const std::string& name : names) {
    const std::string line = name + " " + manifest.files.at(name).sha256 + "\n";
    digest.update(reinterpret_cast<const unsigned char*>(line.data()), line.size());
  }
  return digest.finish();
}

std::map<std::string, EngineRecord> read_engines(const Bundle& bundle) {
  std::map<std::string, EngineRecord> found;
  for (const auto& [name, _] : bundle.manifest().files) {
    if (!is_record(name)) continue;
    const std::string where = (bundle.path() / name).string();
    EngineRecord record =
        record_of(parse_json(read_file(bundle.file(name), kRecordBytes), where, "a build record"),
                  where);
    const std::string graph = record.graph;
    if (!found.emplace(graph, record).second) {
      throw Error(HEADPORT_BUNDLE_ERROR,
                  text(where, ": one build record of each graph was expected, a second one of ", graph,
                       " was found; build it again: ", record.command));
    }
  }
  return found;
}

void require_own(const Bundle& bundle, const EngineRecord& record) {
  const Manifest& manifest = bundle.manifest();
  std::string faults;
  const auto compare = [&](const std::string& what, const std::string& expected,
                           const std::string& here) {
    if (expected == here) return;
    faults += text(faults.empty() ? "" : "; ", record.plan, what, " (sha256 ", shortened(expected),
                   " expected, ", shortened(here), " found)");
  };
  const auto plan = manifest.files.find(record.plan);
  if (plan == manifest.files.end()) {
    faults = record.plan + " is missing";
  } else {
    compare(" is another plan", record.plan_sha256, plan->second.sha256);
  }
  const auto graph = manifest.graphs.find(record.graph);
  if (graph != manifest.graphs.end()) {
    compare(" was made from another graph than " + graph->second.file, record.graph_sha256,
            manifest.files.at(graph->second.file).sha256);
  }
  compare(" was made from another bundle", record.bundle_sha256, bundle_digest(manifest));
  if (faults.empty()) return;
  throw Error(HEADPORT_BUNDLE_ERROR,
              text(bundle.path().string(), ": ", faults, "; build it again: ", record.command));
}

void require_gpu(const EngineRecord& record, const Gpu& gpu) {
  const auto& targets = record.compute_capabilities;
  if (targets.empty() ||
      std::find(targets.begin(), targets.end(), gpu.compute_capability) != targets.end()) {
    return;
  }
  std::string listed;
  for (const std::string& each : targets) listed += (listed.empty() ? "" : ", ") + each;
  throw Error(HEADPORT_NO_GPU,
              text(record.plan, " was built for ", listed, "; the GPU here, ", gpu.name, ", is ",
                   gpu.compute_capability, "; build it again for it: ", record.command));
}

void require_version(const EngineRecord& record, const std::string& version) {
  if (version == record.backend_version || record.has_flag(kCarriesCode)) return;
  throw Error(HEADPORT_LIBRARY_ERROR,
              text(record.plan, " was built with ", record.backend, " ", record.backend_version, ", ",
                   version, " was loaded; a plan belongs to its version: install that one, or build "
                   "it again: ", record.command));
}

}  // namespace headport::internal
