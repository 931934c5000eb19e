// One loaded graph, and buffers that stay where it reads and writes them.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ort/library.h"
#include "ort/threads.h"

namespace headport::internal {

// Bytes of an element. Errors: HEADPORT_UNSUPPORTED if this library has no use for the type.
std::size_t element_bytes(const std::string& dtype);

class Session {
 public:
  // `options` are session configuration entries, as the manifest lists them.
  // Errors: HEADPORT_BUNDLE_ERROR if ONNX Runtime cannot load the graph.
  Session(std::shared_ptr<Library> library, const std::string& file,
          const std::map<std::string, std::string>& options, Threads threads);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session();

  const std::vector<std::string>& inputs() const { return inputs_; }
  const std::vector<std::string>& outputs() const { return outputs_; }

 private:
  friend class Binding;
  std::vector<std::string> names(bool input) const;

  std::shared_ptr<Library> library_;
  std::string file_;
  OrtSession* session_ = nullptr;
  std::vector<std::string> inputs_;
  std::vector<std::string> outputs_;
};

// Buffers of the caller's, bound to a session's inputs and outputs. One buffer bound as both is
// updated in place. The buffers and the session must outlive it.
class Binding {
 public:
  explicit Binding(Session& session);
  Binding(const Binding&) = delete;
  Binding& operator=(const Binding&) = delete;
  ~Binding();

  void input(const std::string& name, void* data, const std::vector<std::int64_t>& shape,
             const std::string& dtype);
  void output(const std::string& name, void* data, const std::vector<std::int64_t>& shape,
              const std::string& dtype);
  // Errors: HEADPORT_LIBRARY_ERROR if a run fails.
  void run();

 private:
  OrtValue* value(void* data, const std::vector<std::int64_t>& shape, const std::string& dtype);

  Session& session_;
  OrtIoBinding* binding_ = nullptr;
  OrtMemoryInfo* memory_ = nullptr;
  OrtRunOptions* run_options_ = nullptr;
  std::vector<OrtValue*> values_;
};

}  // namespace headport::internal
