#include "bundle/manifest.h"

#include <nlohmann/json.hpp>

#include "bundle/json.h"
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

Head head_of(const json& value) {
  Head head;
  head.graph = value["graph"];
  head.outputs = value["outputs"];
  head.vocab_size = value["vocab_size"];
  head.scale = value["scale"];
  head.softcap = optional_of<double>(value["softcap"]);
  head.bias = value["bias"];
  head.weight = value["weight"];
  const json& quantization = value["quantization"];
  if (!quantization.is_null()) {
    head.quantization = Quantization{optional_of<std::int64_t>(quantization["block"]),
                                     quantization["activations"]};
  }
  head.transform = optional_of<std::string>(value.value("transform", json()));
  const auto form = value.find("candidates");
  if (form == value.end() || form->is_null()) return head;
  const json& given = *form;
  head.candidates = CandidateForm{given["count"], given["certified"], given["full"],
                                  given["original"]};
  return head;
}

constexpr std::int64_t kMostCpus = 1024;  // src/headport/manifest.py has the same number

Tuning tuning_of(const json& value, const std::string& where) {
  const Tuning found{value["cpu"], value["cpus"], value["threads"], value["spinning"]};
  if (found.cpu.empty() || found.threads < 1 || found.threads > found.cpus ||
      found.cpus > kMostCpus) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(where, ": $.tuned: the model of a CPU, and from 1 thread up to as many as "
                     "there are CPUs, at most ", kMostCpus, ", were expected; '", found.cpu, "', ",
                     found.threads, " threads and ", found.cpus, " CPUs were found"));
  }
  return found;
}

// What a bundle may have and this library does not run: a field of the manifest, and what it says.
constexpr struct {
  const char* field;
  const char* meaning;
} kNotRun[] = {
    {"source", "an encoder, whose states its tokens read"},
    {"prefix", "learnt keys and values that every sequence begins with"},
};

void refuse_not_run(const json& manifest, const std::string& where) {
  for (const auto& [field, meaning] : kNotRun) {
    const auto found = manifest.find(field);
    if (found == manifest.end() || found->is_null()) continue;
    throw Error(HEADPORT_UNSUPPORTED, text(where, ": the bundle has a ", field, ", ", meaning,
                                           "; run it with the Python runtime"));
  }
}

}  // namespace

Manifest read_manifest(const std::string& data, const std::string& where) {
  const json value = parse_json(data, where, "a headport manifest");
  check_manifest(value, where);
  refuse_not_run(value, where);
  Manifest found;
  found.architecture = value["model"]["architecture"];
  found.hidden_size = value["model"]["hidden_size"];
  found.max_context = value["model"]["max_context"];
  for (const auto& [name, each] : value["graphs"].items()) found.graphs[name] = graph_of(each);
  for (const auto& [name, each] : value["heads"].items()) {
    found.heads[name] = head_of(each);
  }
  for (const json& each : value["tensors"]) {
    found.tensors.push_back({each["name"], each["dtype"],
                             each["shape"].get<std::vector<std::int64_t>>(), each["file"],
                             each["offset"], each["length"],
                             each["consumers"].get<std::vector<std::string>>()});
  }
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
  for (const json& each : value.value("tuned", json::array())) {
    found.tuned.push_back(tuning_of(each, where));
  }
  return found;
}

}  // namespace headport::internal
