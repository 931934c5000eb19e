#include "generator/ports.h"

#include <algorithm>

#include "error.h"

namespace headport::internal {

void check_names(const Bundle& bundle, const std::string& file, const std::vector<Port>& ports,
                 std::vector<std::string> found) {
  std::vector<std::string> declared;
  for (const Port& port : ports) declared.push_back(port.name);
  std::sort(declared.begin(), declared.end());
  std::sort(found.begin(), found.end());
  if (declared == found) return;
  throw Error(HEADPORT_BUNDLE_ERROR,
              text(bundle.path().string(), ": the ports of ", file,
                   " are not those of the manifest; export the bundle again"));
}

bool within(std::int64_t dimension, std::int64_t largest) {
  return dimension >= 1 && dimension <= largest;
}

const Graph& graph_of(const Bundle& bundle, const std::string& name) {
  const auto& graphs = bundle.manifest().graphs;
  const auto found = graphs.find(name);
  if (found != graphs.end()) return found->second;
  throw Error(HEADPORT_BUNDLE_ERROR, text(bundle.path().string(), ": no graph '", name, "' in it"));
}

const Port& port_of(const Bundle& bundle, const std::vector<Port>& ports, const std::string& name) {
  for (const Port& port : ports) {
    if (port.name == name) return port;
  }
  throw Error(HEADPORT_BUNDLE_ERROR,
              text(bundle.path().string(), ": the manifest names no port ", name));
}

const Head& head_of(const Bundle& bundle, const std::string& name) {
  const auto& heads = bundle.manifest().heads;
  const auto found = heads.find(name);
  if (found != heads.end()) return found->second;
  std::string known;
  for (const auto& [each, _] : heads) known += (known.empty() ? "" : ", ") + each;
  throw Error(HEADPORT_BUNDLE_ERROR,
              text(bundle.path().string(), ": no head '", name, "' in it (heads: ",
                   known.empty() ? "none" : known, ")"));
}

void check_ports(const Bundle& bundle, const Graph& graph, const Session& session) {
  check_names(bundle, graph.file, graph.inputs, session.inputs());
  check_names(bundle, graph.file, graph.outputs, session.outputs());
}

}  // namespace headport::internal
