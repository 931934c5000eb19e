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

// What a head that gives candidates gives, and where its other graph is.
struct CandidateForm {
  std::int64_t count = 0;  // candidates per row
  bool certified = false;
  std::string full;  // the graph with the original weight that gives all logits
  std::string original;  // the original weight in the tensor ledger
};

struct Quantization {
  std::optional<std::int64_t> block;
  std::string activations;
};

struct Head {
  std::string graph;
  std::string outputs;  // `logits` or `candidates`
  std::int64_t vocab_size = 0;
  double scale = 1.0;
  std::optional<double> softcap;
  bool bias = false;
  std::string weight;  // in the tensor ledger
  std::optional<Quantization> quantization;
  std::optional<CandidateForm> candidates;
  std::optional<std::string> transform;  // graph that comes before it
};

// A large tensor. `consumers` are `graph:initializer` names.
struct Tensor {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string file;
  std::int64_t offset = 0;  // bytes
  std::int64_t length = 0;  // bytes
  std::vector<std::string> consumers;
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

// With how many threads the bundle answers fastest on one kind of machine.
struct Tuning {
  std::string cpu;
  std::int64_t cpus = 0;
  std::int64_t threads = 0;
  bool spinning = false;
};

struct Manifest {
  std::string architecture;
  std::int64_t hidden_size = 0;
  std::int64_t max_context = 0;
  std::map<std::string, Graph> graphs;
  std::map<std::string, Head> heads;
  std::vector<Tensor> tensors;
  Vocabulary vocabulary;
  std::string defaults;  // generation defaults, as JSON
  std::map<std::string, std::string> session_options;
  std::string target;
  std::map<std::string, FileEntry> files;
  std::vector<Tuning> tuned;  // one per kind of machine
};

// `where` names the file in messages.
// Errors: HEADPORT_BUNDLE_ERROR if it is no JSON, of an unknown schema version, or has missing,
// unknown or ill-typed fields; HEADPORT_UNSUPPORTED if the bundle has what this library does not run.
Manifest read_manifest(const std::string& data, const std::string& where);

}  // namespace headport::internal
