#include "bundle/manifest.h"

#include <nlohmann/json.hpp>

#include "bundle/schema.h"
#include "error.h"

namespace headport::internal {
namespace {

using nlohmann::json;

template <typename T>
std::optional<T> optional_of(const json& value) {
  if (value.is_null()) return std::nullopt;
  return value.get<T>();
}

Port port_of(const json& value) {
  Port port{value["name"], value["dtype"], {}, {}};
  for (const json& dimension : value["shape"]) {
    const bool symbol = dimension.is_string();
    port.shape.push_back(symbol ? -1 : dimension.get<std::int64_t>());
    port.symbols.push_back(symbol ? dimension.get<std::string>() : "");
  }
  return port;
}

Graph graph_of(const json& value) {
  Graph graph{value["file"], value["role"], {}, {}};
  for (const json& port : value["inputs"]) graph.inputs.push_back(port_of(port));
  for (const json& port : value["outputs"]) graph.outputs.push_back(port_of(port));
  return graph;
}

// Writing JSON recurses, so what a stranger wrote must not be as deep as the stack is long.
constexpr int kDeepest = 64;

json parse(const std::string& data, const std::string& where) {
  try {
    return json::parse(data, [&](int depth, json::parse_event_t, json&) {
      if (depth <= kDeepest) return true;
      throw Error(HEADPORT_BUNDLE_ERROR,
                  text(where, ": not a headport manifest (nested more than ", kDeepest, " deep)"));
    });
  } catch (const json::exception& error) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(where, ": not a headport manifest (", error.what(), ")"));
  }
}

}  // namespace

Manifest read_manifest(const std::string& data, const std::string& where) {
  const json value = parse(data, where);
  check_manifest(value, where);
  Manifest found;
  found.architecture = value["model"]["architecture"];
  found.hidden_size = value["model"]["hidden_size"];
  found.max_context = value["model"]["max_context"];
  for (const auto& [name, each] : value["graphs"].items()) found.graphs[name] = graph_of(each);
  for (const auto& [name, each] : value["heads"].items()) {
    found.heads[name] = {each["graph"], each["outputs"],
                         optional_of<std::string>(each.value("transform", json()))};
  }
  for (const json& tensor : value["tensors"]) found.tensor_files.push_back(tensor["file"]);
  const json& vocabulary = value["vocabulary"];
  found.vocabulary = {vocabulary["size"], optional_of<std::int64_t>(vocabulary["kept_size"]),
                      optional_of<std::string>(vocabulary["map"])};
  found.defaults = value["defaults"].dump();
  for (const auto& [name, each] : value["session_options"].items()) {
    found.session_options[name] = each.get<std::string>();
  }
  found.target = value["target"];
  for (const auto& [name, each] : value["files"].items()) {
    found.files[name] = {each["sha256"], each["bytes"]};
  }
  return found;
}

}  // namespace headport::internal
