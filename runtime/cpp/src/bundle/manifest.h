// `manifest.json`: what of it this library acts on.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace headport::internal {

// One input or output of a graph.
struct Port {
  std::string name;
  std::string dtype;  // ONNX element type in lower case: float, float16, int64 …
  std::vector<std::int64_t> shape;   // -1 where the dimension is a symbol
  std::vector<std::string> symbols;  // empty where it is a number
};

struct Graph {
  std::string file;
  std::string role;
  std::vector<Port> inputs;
  std::vector<Port> outputs;
};

struct Head {
  std::string graph;
  std::string outputs;  // `logits` or `candidates`
  std::optional<std::string> transform;  // graph that comes before it
};

struct FileEntry {
  std::string sha256;
  std::int64_t bytes = 0;
};

struct Vocabulary {
  std::int64_t size = 0;
  std::optional<std::int64_t> kept_size;
  std::optional<std::string> map;
};

struct Manifest {
  std::string architecture;
  std::int64_t hidden_size = 0;
  std::int64_t max_context = 0;
  std::map<std::string, Graph> graphs;
  std::map<std::string, Head> heads;
  std::vector<std::string> tensor_files;
  Vocabulary vocabulary;
  std::string defaults;  // generation defaults, as JSON
  std::map<std::string, std::string> session_options;
  std::string target;
  std::map<std::string, FileEntry> files;
};

// `where` names the file in messages.
// Errors: HEADPORT_BUNDLE_ERROR if it is no JSON, of an unknown schema version, or has missing,
// unknown or ill-typed fields.
Manifest read_manifest(const std::string& data, const std::string& where);

}  // namespace headport::internal
