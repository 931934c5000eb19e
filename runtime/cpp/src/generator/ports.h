// What the manifest says of a graph's inputs and outputs, and whether the graph says the same.
#pragma once

#include <string>
#include <vector>

#include "bundle/bundle.h"
#include "ort/session.h"

namespace headport::internal {

// Errors of all: HEADPORT_BUNDLE_ERROR.
const Graph& graph_of(const Bundle& bundle, const std::string& name);
const Port& port_of(const Bundle& bundle, const std::vector<Port>& ports, const std::string& name);
const Head& head_of(const Bundle& bundle, const std::string& name);
// Whether a graph's loaded form, from `file`, has the ports that the manifest names.
void check_names(const Bundle& bundle, const std::string& file, const std::vector<Port>& ports,
                 std::vector<std::string> found);
void check_ports(const Bundle& bundle, const Graph& graph, const Session& session);

// Whether a dimension is from 1 to a limit. The limits are far above any model's, and low enough
// that products of a few do not overflow.
constexpr std::int64_t kLargestDimension = std::int64_t{1} << 31;
bool within(std::int64_t dimension, std::int64_t largest);

}  // namespace headport::internal
