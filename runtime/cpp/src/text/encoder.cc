#include "text/encoder.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "error.h"
#include "text/encodable.h"

namespace headport::internal {

// The functions of ort_genai_c.h that are used: results are null, or a message to be freed.
struct Encoder::Api {
  void* (*create_tokenizer)(const char* folder, void** tokenizer);
  void (*destroy_tokenizer)(void* tokenizer);
  void* (*update_options)(void* tokenizer, const char* const* keys, const char* const* values,
                          std::size_t count);
  void* (*encode)(const void* tokenizer, const char* text, void* sequences);
  void* (*create_sequences)(void** sequences);
  void (*destroy_sequences)(void* sequences);
  std::size_t (*sequence_count)(const void* sequences, std::size_t index);
  const std::int32_t* (*sequence_data)(const void* sequences, std::size_t index);
  const char* (*error_of)(const void* result);
  void (*destroy_result)(void* result);
};

namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(HEADPORT_LIBRARY_ERROR, message);
}

// Never unloaded: its static objects may be in use to the end.
void* open_library(const std::string& path, const Library& onnxruntime) {
  const char* named = std::getenv("HEADPORT_TOKENIZER");
  const std::string chosen = !path.empty() ? path : named != nullptr ? named : "";
  if (chosen.empty()) {
    refuse("texts are encoded by ONNX Runtime GenAI's shared library, and none is named; give the "
           "path of libonnxruntime-genai.so in the settings, or set HEADPORT_TOKENIZER to it; or "
           "give ids");
  }
  // It takes the ONNX Runtime of the process, which it knows by this name, and ends the process
  // where there is none.
  if (dlopen("libonnxruntime.so.1", RTLD_NOW | RTLD_NOLOAD) == nullptr) {
    refuse(text("the tokenizer library needs ONNX Runtime under the name libonnxruntime.so.1, "
                "release ", onnxruntime.version(), " was loaded under another one"));
  }
  void* handle = dlopen(chosen.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr) return handle;
  const char* fault = dlerror();
  refuse(text("ONNX Runtime GenAI's shared library was expected and could not be loaded (",
              fault != nullptr ? fault : chosen, "); give its path, or set HEADPORT_TOKENIZER to it"));
}

template <typename Function>
void find(void* handle, const char* name, Function*& function) {
  void* symbol = dlsym(handle, name);
  if (symbol == nullptr) {
    refuse(text("ONNX Runtime GenAI of release 0.18 or newer was expected, a library without ", name,
                " was found; give the path of a newer libonnxruntime-genai.so"));
  }
  function = reinterpret_cast<Function*>(symbol);
}

// A folder that is there while the library reads it.
class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "headport-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) {
      refuse(text(pattern, ": a temporary folder cannot be made there; set TMPDIR to a writable one"));
    }
    path_ = pattern;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code error;
    fs::remove_all(path_, error);
  }

  void write(const char* name, const std::string& data) const {
    std::ofstream stream(path_ / name, std::ios::binary);
    if (!(stream << data).flush()) refuse(text((path_ / name).string(), ": cannot be written"));
  }
  std::string path() const { return path_.string(); }

 private:
  fs::path path_;
};

// What the library wants beside a tokenizer; none of it is looked at as texts are encoded.
constexpr const char* kModel =
    R"({"model": {"type": "llama", "context_length": 1, "vocab_size": 1, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0, "decoder": {"filename": "none", "head_size": 1,
    "hidden_size": 1, "num_attention_heads": 1, "num_hidden_layers": 1, "num_key_value_heads": 1,
    "inputs": {}, "outputs": {}}}, "search": {"max_length": 1}})";
constexpr const char* kConfig = R"({"tokenizer_class": "PreTrainedTokenizerFast"})";

}  // namespace

Encoder::Encoder(const std::string& source, const std::string& where, const std::string& library,
                 const Library& onnxruntime)
    : api_(std::make_unique<Api>()) {
  Surroundings around = check_encodable(source, where);
  before_ = std::move(around.before);
  after_ = std::move(around.after);
  void* handle = open_library(library, onnxruntime);
  find(handle, "OgaCreateTokenizerFromPath", api_->create_tokenizer);
  find(handle, "OgaDestroyTokenizer", api_->destroy_tokenizer);
  find(handle, "OgaUpdateTokenizerOptions", api_->update_options);
  find(handle, "OgaTokenizerEncode", api_->encode);
  find(handle, "OgaCreateSequences", api_->create_sequences);
  find(handle, "OgaDestroySequences", api_->destroy_sequences);
  find(handle, "OgaSequencesGetSequenceCount", api_->sequence_count);
  find(handle, "OgaSequencesGetSequenceData", api_->sequence_data);
  find(handle, "OgaResultGetError", api_->error_of);
  find(handle, "OgaDestroyResult", api_->destroy_result);
  const Folder folder;
  folder.write("tokenizer.json", source);
  folder.write("tokenizer_config.json", kConfig);
  folder.write("genai_config.json", kModel);
  check(api_->create_tokenizer(folder.path().c_str(), &tokenizer_), "the tokenizer cannot be made");
  try {
    const char* key = "add_special_tokens";
    const char* value = "false";
    check(api_->update_options(tokenizer_, &key, &value, 1), "its options cannot be set");
  } catch (...) {
    api_->destroy_tokenizer(tokenizer_);
    throw;
  }
}

Encoder::~Encoder() { api_->destroy_tokenizer(tokenizer_); }

void Encoder::check(void* result, const char* what) const {
  if (result == nullptr) return;
  const std::string message = api_->error_of(result);
  api_->destroy_result(result);
  refuse(text("ONNX Runtime GenAI: ", what, ": ", message));
}

Encoder::Found Encoder::encode(const std::string& source) const {
  void* made = nullptr;
  check(api_->create_sequences(&made), "a sequence cannot be made");
  const std::unique_ptr<void, void (*)(void*)> sequences(made, api_->destroy_sequences);
  check(api_->encode(tokenizer_, source.c_str(), sequences.get()), "a text cannot be encoded");
  Found found;
  found.ids = before_;
  found.first = found.ids.size();
  const std::int32_t* ids = api_->sequence_data(sequences.get(), 0);
  found.ids.insert(found.ids.end(), ids, ids + api_->sequence_count(sequences.get(), 0));
  found.last = found.ids.size();
  found.ids.insert(found.ids.end(), after_.begin(), after_.end());
  return found;
}

}  // namespace headport::internal
