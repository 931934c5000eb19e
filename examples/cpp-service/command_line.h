// The command line, and what one client may take of the service.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace service {

struct Limits {
  std::int64_t new_tokens = 1024;  // of one reply
  std::int64_t replies = 32;       // prompts times n
  std::int64_t body_bytes = std::int64_t{1} << 20;
  std::int64_t waiting = 64;  // requests before one is refused
  double seconds = 300.0;     // from the request to its last token, waiting included
  double grace = 30.0;        // seconds that running requests have once it is to stop
};

struct CommandLine {
  std::string bundle;
  std::string host = "127.0.0.1";
  std::int64_t port = 8000;  // 0 = any free one
  std::string name;          // what clients call the model
  std::string onnxruntime;   // its shared library; empty: as headport_settings says
  std::string tokenizer;     // the library that encodes texts; empty: likewise
  std::int64_t workers = 1;  // generators, each with weights and caches of its own
  std::int64_t threads = 0;  // of ONNX Runtime, for each worker
  std::int64_t max_context = 0;
  std::vector<std::string> ignore;  // fields of the bundle's generation_config
  Limits limits;
};

std::string usage();

// Errors: std::invalid_argument, naming what was expected and found.
CommandLine read_command_line(const std::vector<std::string>& words);

}  // namespace service
