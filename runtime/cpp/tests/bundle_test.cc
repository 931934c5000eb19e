// Files of a bundle: what is right is read, what is not is refused with a message.
#include <pthread.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <system_error>
#include <thread>

#include "bundle/bundle.h"
#include "bundle/npy.h"
#include "bundle/sha256.h"
#include "bundle/vocabulary.h"
#include "check.h"
#include "error.h"
#include "generator/defaults.h"
#include "ort/cpus.h"

namespace headport::internal {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// That some work is refused with a status, and a message that says a word.
void check_refused(const char* name, headport_status status, const std::string& word,
                   const std::function<void()>& work) {
  try {
    work();
    CHECK_NAMED(false, std::string(name) + ": nothing was refused");
  } catch (const Error& error) {
    CHECK_NAMED(error.status() == status, name);
    CHECK_NAMED(std::string(error.what()).find(word) != std::string::npos,
                std::string(name) + ": " + error.what());
  }
}

std::string digest(const std::string& data, std::size_t part) {
  Sha256 sha;
  for (std::size_t n = 0; n < data.size(); n += part) {
    sha.update(reinterpret_cast<const unsigned char*>(data.data()) + n,
               std::min(part, data.size() - n));
  }
  return sha.finish();
}

// Source: the examples of FIPS 180-4.
void check_sha256() {
  CHECK(digest("", 1) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(digest("abc", 2) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  const std::string million(1000000, 'a');
  for (const std::size_t part : {std::size_t{63}, std::size_t{64}, std::size_t{1000000}}) {
    CHECK(digest(million, part) ==
          "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
}

std::string npy(const std::string& header, const std::string& body) {
  std::string data = "\x93NUMPY";
  data += '\1';
  data += '\0';
  data += static_cast<char>(header.size());
  data += '\0';
  return data + header + body;
}

void check_npy() {
  const std::string header = "{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }\n";
  const std::string body("\5\0\0\0\377\377\377\377", 8);
  CHECK(read_npy_int32(npy(header, body), "map") == (std::vector<std::int32_t>{5, -1}));
  const auto refused = [&](const char* name, const std::string& data, const char* word) {
    check_refused(name, HEADPORT_BUNDLE_ERROR, word, [&] { read_npy_int32(data, "map"); });
  };
  refused("empty", "", "does not begin");
  refused("short", npy(header, body.substr(1)), "size");
  refused("long", npy(header, body + "x"), "size");
  refused("header cut off", npy(header, "").substr(0, 20), "cut off");
  refused("int64", npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1,), }", body),
          "something else");
  refused("two axes", npy("{'descr': '<i4', 'fortran_order': False, 'shape': (1, 2), }", body),
          "something else");
  refused("huge", npy("{'descr': '<i4', 'fortran_order': False, 'shape': (4611686018427387906,), }",
                      body), "something else");
  refused("no shape", npy("{'descr': '<i4', 'fortran_order': False, }", body), "something else");
}

void check_id_map() {
  const IdMap map(10, {2, 7, 9}, "map");
  CHECK(map.ids() == (std::vector<std::int64_t>{2, 7, 9}));
  CHECK(map.kept() == 3 && map.pruned());
  const auto refused = [](const char* word, const std::vector<std::int32_t>& ids) {
    check_refused(word, HEADPORT_BUNDLE_ERROR, word, [&] { IdMap(10, ids, "map"); });
  };
  refused("ascending ids expected, 7 and 2 found at 0", {7, 2, 9});
  refused("ascending ids expected, 1 and 1 found at 1", {0, 1, 1});
  refused("ids from 0 to 9 expected, -1 found", {-1, 1});
  refused("ids from 0 to 9 expected, 10 found", {1, 10});
  refused("at least one id expected", {});
}

// The same texts as in tests/test_machine.py.
void check_cpu_model() {
  const std::string first =
      "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2\n";
  CHECK(cpu_model_of(first) == "AMD EPYC (cpu family 25, model 1)");
  CHECK(cpu_model_of(first + "\nmodel name\t: other\n") == "AMD EPYC (cpu family 25, model 1)");
  CHECK(cpu_model_of("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n") ==
        "CPU implementer 0x41, CPU part 0xd40");
  CHECK(cpu_model_of("model name\t: ARMv7 Processor\n") == "ARMv7 Processor");
  CHECK(cpu_model_of("processor\t: 0\n").empty() && cpu_model_of("").empty());
}

json tiny_manifest() {
  return json::parse(R"({
    "schema_version": 1,
    "license": {"id": null, "source": "none", "files": []},
    "provenance": {"checkpoint": "x", "format": "none", "sha256": "0", "stages": []},
    "model": {"architecture": "X", "hidden_size": 2, "layers": 0, "max_context": 8,
              "dtype": "fp32"},
    "graphs": {}, "heads": {}, "tensors": [],
    "vocabulary": {"size": 3, "padded_size": 3, "kept_size": null, "map": null},
    "defaults": {}, "session_options": {}, "target": "ort-cpu", "selftest": null,
    "files": {"a/b.txt": {
      "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", "bytes": 3}}
  })");
}

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / "headport_bundle_test") {
    fs::remove_all(path_);
    fs::create_directories(path_ / "a");
    write("a/b.txt", "abc");
  }
  ~Folder() { fs::remove_all(path_); }
  void write(const std::string& name, const std::string& data) const {
    std::ofstream(path_ / name, std::ios::binary) << data;
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

void check_bundle() {
  const Folder folder;
  const auto refused = [&](const char* name, const json& manifest, const char* word) {
    folder.write("manifest.json", manifest.dump());
    check_refused(name, HEADPORT_BUNDLE_ERROR, word,
                  [&] { Bundle::open(folder.path().string(), true); });
  };
  check_refused("nothing there", HEADPORT_BUNDLE_ERROR, "nothing is there",
                [&] { Bundle::open((folder.path() / "none").string(), true); });
  check_refused("no manifest", HEADPORT_BUNDLE_ERROR, "not a headport bundle",
                [&] { Bundle::open(folder.path().string(), true); });
  folder.write("manifest.json", tiny_manifest().dump());
  CHECK(Bundle::open(folder.path().string(), true).manifest().vocabulary.size == 3);

  folder.write("manifest.json", "{");
  check_refused("no JSON", HEADPORT_BUNDLE_ERROR, "not a headport manifest",
                [&] { Bundle::open(folder.path().string(), true); });
  folder.write("manifest.json", std::string(100000, '['));
  check_refused("deep", HEADPORT_BUNDLE_ERROR, "nested more than 64 deep",
                [&] { Bundle::open(folder.path().string(), true); });
  json changed = tiny_manifest();
  changed["schema_version"] = 2;
  refused("newer", changed, "schema version 1 expected, 2 found");
  changed = tiny_manifest();
  changed["surprise"] = 1;
  refused("unknown field", changed, "surprise");
  const json tuning = {{"cpu", "C"}, {"cpus", 4}, {"instructions", json::array({"avx2"})},
                       {"onnxruntime", "1.32.0"}, {"threads", 2}, {"spinning", false}};
  changed = tiny_manifest();
  changed["tuned"] = json::array({tuning});
  folder.write("manifest.json", changed.dump());
  const std::vector<Tuning> tuned = Bundle::open(folder.path().string(), true).manifest().tuned;
  CHECK(tuned.size() == 1 && tuned[0].cpu == "C" && tuned[0].cpus == 4 && tuned[0].threads == 2 &&
        !tuned[0].spinning);
  const auto wrong = [&](const char* field, const json& value, const char* word) {
    changed["tuned"][0] = tuning;
    changed["tuned"][0][field] = value;
    refused(field, changed, word);
  };
  wrong("threads", -1, "'C', -1 threads and 4 CPUs were found");
  wrong("threads", 0, "0 threads");
  wrong("threads", 5, "5 threads");
  wrong("cpus", 2000, "2000 CPUs");
  wrong("cpu", "", "''");
  wrong("threads", "2", "$.tuned[0].threads: a whole number was expected, string");
  wrong("threads", 2.5, "a whole number was expected, number");
  wrong("spinning", 1, "true or false was expected");
  wrong("surprise", 1, "surprise");
  changed["tuned"] = tuning;
  refused("one record", changed, "$.tuned: a list was expected, object");
  for (const char* field : {"prefix", "source"}) {
    changed = tiny_manifest();
    changed[field] = {{"tokens", 4}};
    folder.write("manifest.json", changed.dump());
    check_refused(field, HEADPORT_UNSUPPORTED, std::string("the bundle has a ") + field,
                  [&] { Bundle::open(folder.path().string(), true); });
    changed[field] = nullptr;
    folder.write("manifest.json", changed.dump());
    Bundle::open(folder.path().string(), true);
  }
  changed = tiny_manifest();
  changed["model"].erase("layers");
  refused("missing field", changed, "$.model: the field layers is missing");
  changed = tiny_manifest();
  changed["vocabulary"]["size"] = "3";
  refused("wrong type", changed, "$.vocabulary.size: a whole number was expected, string");
  changed = tiny_manifest();
  changed["tensors"] = {{{"name", "w"}, {"sha256", "0"}, {"dtype", "float"}, {"shape", {1}},
                         {"file", "data.bin"}, {"offset", 0}, {"length", 4},
                         {"consumers", json::array()}}};
  refused("unlisted file", changed, "data.bin: used by a graph but not listed");
  for (const char* name : {"../b.txt", "/etc/passwd", "a/../../b.txt"}) {
    changed = tiny_manifest();
    changed["files"][name] = changed["files"]["a/b.txt"];
    refused(name, changed, "bundle");
  }
  fs::create_symlink("b.txt", folder.path() / "a" / "link.txt");
  changed = tiny_manifest();
  changed["files"]["a/link.txt"] = changed["files"]["a/b.txt"];
  refused("symbolic link", changed, "a symbolic link");
  changed = tiny_manifest();
  changed["files"]["gone.txt"] = changed["files"]["a/b.txt"];
  refused("missing file", changed, "gone.txt: missing");
  folder.write("a/b.txt", "abd");
  refused("changed", tiny_manifest(), "its sha256 is not the manifest's");
  Bundle::open(folder.path().string(), false);  // presence and size alone
  folder.write("a/b.txt", "abcd");
  refused("longer", tiny_manifest(), "3 bytes expected, 4 found");
}

// Where the system gives no more threads, one looks at all files.
void check_bundle_without_threads() {
#ifdef __GLIBC__
  const Folder folder;
  folder.write("manifest.json", tiny_manifest().dump());
  pthread_attr_t before, none;
  pthread_getattr_default_np(&before);
  pthread_attr_init(&none);
  pthread_attr_setstacksize(&none, std::size_t{1} << 46);  // no memory for such a stack
  CHECK(pthread_setattr_default_np(&none) == 0);
  bool refused = false;
  try {
    std::thread([] {}).join();
  } catch (const std::system_error&) {
    refused = true;
  }
  CHECK(refused);
  CHECK(Bundle::open(folder.path().string(), true).manifest().vocabulary.size == 3);
  folder.write("a/b.txt", "abd");
  check_refused("changed", HEADPORT_BUNDLE_ERROR, "its sha256 is not the manifest's",
                [&] { Bundle::open(folder.path().string(), true); });
  pthread_setattr_default_np(&before);
#endif
}

void check_defaults() {
  const Defaults greedy = read_defaults(R"({"temperature": 0.7, "eos_token_id": 2})", {});
  CHECK(greedy.sampling.temperature == 0.0);
  CHECK(greedy.ends == Ids{2});
  const Defaults sampled = read_defaults(
      R"({"do_sample": true, "top_k": 40, "eos_token_id": [2, 3], "num_beams": 1,
          "sequence_bias": [[[5], 1.5]], "guidance_scale": null})", {});
  CHECK(sampled.sampling.temperature == 1.0);
  CHECK(sampled.sampling.top_k == 40);
  CHECK(sampled.ends == (Ids{2, 3}));
  CHECK(sampled.sampling.logit_bias.size() == 1);
  const Defaults forced =
      read_defaults(R"({"forced_bos_token_id": 5, "forced_eos_token_id": [2, 3]})", {});
  CHECK(forced.sampling.forced_bos == 5 && forced.sampling.forced_eos == (Ids{2, 3}));
  CHECK(read_defaults(R"({"forced_eos_token_id": 2})", {}).sampling.forced_eos == Ids{2});
  const auto refused = [](headport_status status, const char* fields, const char* word) {
    check_refused(fields, status, word, [&] { read_defaults(fields, {}); });
  };
  const Defaults beams = read_defaults(
      R"({"num_beams": 4, "early_stopping": "never", "length_penalty": 0.5, "stop_strings": "x"})",
      {});
  CHECK(beams.beams.num_beams == 4 && beams.beams.length_penalty == 0.5);
  CHECK(beams.beams.early_stopping == EarlyStopping::kNever);
  CHECK(beams.stop == std::vector<std::string>{"x"});
  refused(HEADPORT_UNSUPPORTED, R"({"do_sample": true, "num_beams": 4})",
          "do_sample=true, num_beams=4");
  refused(HEADPORT_BUNDLE_ERROR, R"({"do_sample": 1})", "do_sample must be true or false, 1 was");
  refused(HEADPORT_BUNDLE_ERROR, R"({"early_stopping": 1})", "early_stopping must be");
  refused(HEADPORT_BUNDLE_ERROR, R"({"stop_strings": [""]})", "stop_strings must be texts");
  refused(HEADPORT_BUNDLE_ERROR, R"({"num_beams": 1001})", "num_beams must be");
  refused(HEADPORT_UNSUPPORTED, R"({"a_new_field": 1})", "a_new_field=1");
  refused(HEADPORT_UNSUPPORTED, R"({"encoder_no_repeat_ngram_size": 2})", "ngram_size=2");
  read_defaults(R"({"encoder_no_repeat_ngram_size": 0})", {});
  refused(HEADPORT_BUNDLE_ERROR, R"({"top_p": 1.5})", "top_p must be");
  refused(HEADPORT_BUNDLE_ERROR, R"({"forced_bos_token_id": [5]})", "forced_bos_token_id must be");
  check_refused("forced beyond", HEADPORT_BUNDLE_ERROR, "forced_eos_token_id: 3", [&] {
    check_ids(forced.sampling, forced.ends, 3, HEADPORT_BUNDLE_ERROR);
  });
  refused(HEADPORT_BUNDLE_ERROR, R"({"top_k": 1.5})", "top_k must be a whole number");
  CHECK(read_defaults(R"({"num_beams": 4})", {"num_beams"}).beams.num_beams == 1);
}

}  // namespace
}  // namespace headport::internal

int main() {
  using namespace headport::internal;
  check_sha256();
  check_npy();
  check_id_map();
  check_cpu_model();
  check_bundle();
  check_bundle_without_threads();
  check_defaults();
  return headport::test::result();
}
