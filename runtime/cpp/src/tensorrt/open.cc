#include "tensorrt/open.h"

#include <limits>

#include "error.h"
#include "generator/ports.h"
#include "tensorrt/engine.h"

namespace headport::internal {
namespace {

constexpr const char* kMerged = "merged";  // graph name of a plan that holds backbone and head

std::string backbone_name(const Bundle& bundle) {
  for (const auto& [name, graph] : bundle.manifest().graphs) {
    if (graph.role == "backbone") return name;
  }
  throw Error(HEADPORT_BUNDLE_ERROR, text(bundle.path().string(), ": no backbone in it"));
}

const EngineRecord& record_of(const Bundle& bundle, const std::map<std::string, EngineRecord>& all,
                              const std::string& graph) {
  const auto found = all.find(graph);
  if (found != all.end()) return found->second;
  const std::string where = bundle.path().string();
  if (all.count(kMerged) > 0) {
    throw Error(HEADPORT_UNSUPPORTED,
                text(where, ": its plan is merged, so the head cannot be run by itself; build it "
                     "without --merged"));
  }
  throw Error(HEADPORT_BUNDLE_ERROR,
              text(where, ": a plan of ", graph, " was expected, none is there; build it with "
                   "`headport engine`"));
}

const std::string& graph_of_head(const Bundle& bundle, const std::string& name) {
  const Head& head = head_of(bundle, name);
  if (head.outputs == "logits" && !head.transform) return head.graph;
  throw Error(HEADPORT_UNSUPPORTED,
              text(bundle.path().string(), ": plans of heads that give logits by themselves are run "
                   "here, head '", name, "' is another; run it with the Python runtime"));
}

}  // namespace

std::unique_ptr<PlanRunner> open_plans(const Bundle& bundle, const std::string& head,
                                       const std::string& library, bool record_graphs) {
  const auto all = read_engines(bundle);
  const EngineRecord& backbone = record_of(bundle, all, backbone_name(bundle));
  const EngineRecord& top = record_of(bundle, all, graph_of_head(bundle, head));
  if (backbone.backend != top.backend) {
    throw Error(HEADPORT_BUNDLE_ERROR, text(bundle.path().string(), ": plans of ", backbone.backend,
                                            " and ", top.backend, " do not run together"));
  }
  for (const EngineRecord* each : {&backbone, &top}) require_own(bundle, *each);
  require_headers(backbone.backend);
  const DriverApi driver = load_driver();
  const Gpu gpu = find_gpu(driver);
  for (const EngineRecord* each : {&backbone, &top}) require_gpu(*each, gpu);
  const auto tensorrt = load_tensorrt(backbone.backend, library);
  for (const EngineRecord* each : {&backbone, &top}) require_version(*each, tensorrt->version());
  auto device = std::make_unique<CudaDevice>(driver);
  const auto open = [&](const EngineRecord& record) {
    const std::string data =
        read_file(bundle.file(record.plan), std::numeric_limits<std::uintmax_t>::max());
    auto plan = std::make_unique<Plan>(record.plan, tensorrt->open(record, data, *device, record_graphs),
                                       *device);
    const Graph& graph = graph_of(bundle, record.graph);
    check_names(bundle, record.plan, graph.inputs, plan->names(true));
    check_names(bundle, record.plan, graph.outputs, plan->names(false));
    return plan;
  };
  auto opened_backbone = open(backbone);
  auto opened_head = open(top);
  return std::make_unique<PlanRunner>(std::move(device), std::move(opened_backbone),
                                      std::move(opened_head));
}

}  // namespace headport::internal
