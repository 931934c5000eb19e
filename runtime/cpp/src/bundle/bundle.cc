#include "bundle/bundle.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <fstream>
#include <system_error>
#include <thread>
#include <vector>

#include "bundle/sha256.h"
#include "error.h"

namespace headport::internal {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifestFile = "manifest.json";
constexpr std::uintmax_t kManifestBytes = std::uintmax_t{256} << 20;
constexpr std::size_t kChunkBytes = std::size_t{1} << 20;
constexpr unsigned kMostThreads = 8;

// What is wrong with a path before anything is looked at; empty where it is inside the bundle.
std::string out_of_bounds(const fs::path& root, const std::string& name) {
  if (name.find('\0') != std::string::npos) return "a name with a null character in it";
  const fs::path relative(name);
  if (relative.is_absolute()) {
    return name + ": an absolute path; only files inside the bundle are allowed";
  }
  fs::path part;
  for (const fs::path& each : relative) {
    if (each == "..") return name + ": leads out of the bundle with '..'";
    part /= each;
    std::error_code error;
    if (fs::is_symlink(fs::symlink_status(root / part, error))) {
      return part.string() + ": a symbolic link; copy the real file into the bundle";
    }
  }
  return {};
}

std::string sha256_of(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  std::vector<char> chunk(kChunkBytes);
  Sha256 digest;
  while (stream.read(chunk.data(), static_cast<std::streamsize>(chunk.size())) ||
         stream.gcount() > 0) {
    digest.update(reinterpret_cast<const unsigned char*>(chunk.data()),
                  static_cast<std::size_t>(stream.gcount()));
  }
  return digest.finish();
}

std::string fault_of(const fs::path& path, const std::string& name, const FileEntry& entry,
                     bool verify) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return name + ": missing";
  const auto size = fs::file_size(path, error);
  if (error || size != static_cast<std::uintmax_t>(entry.bytes)) {
    return text(name, ": changed (", entry.bytes, " bytes expected, ", size, " found)");
  }
  if (verify && sha256_of(path) != entry.sha256) {
    return name + ": changed (its sha256 is not the manifest's)";
  }
  return {};
}

// Threads that are waited for, however their scope is left.
class Threads {
 public:
  ~Threads() {
    for (std::thread& each : threads_) each.join();
  }
  // One more thread with this work; false where the system gives none.
  template <typename Work>
  bool add(const Work& work) {
    try {
      threads_.emplace_back(work);
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }

 private:
  std::vector<std::thread> threads_;
};

// The faults of all files, looked at by a few threads.
std::vector<std::string> faults_of(const fs::path& root, const Manifest& manifest, bool verify) {
  std::vector<std::pair<std::string, FileEntry>> files(manifest.files.begin(),
                                                       manifest.files.end());
  std::vector<std::string> found(files.size());
  std::vector<std::exception_ptr> thrown(files.size());  // one slot per file: nothing is shared
  std::atomic<std::size_t> next{0};
  auto work = [&]() noexcept {
    for (std::size_t n = next++; n < files.size(); n = next++) {
      try {
        found[n] = fault_of(root / files[n].first, files[n].first, files[n].second, verify);
      } catch (...) {
        thrown[n] = std::current_exception();
      }
    }
  };
  {
    Threads others;
    const unsigned count = verify ? std::min(std::thread::hardware_concurrency(), kMostThreads) : 1;
    for (unsigned n = 1; n < count && others.add(work); ++n) {
    }
    work();  // does all of it where there are no others
  }
  for (const std::exception_ptr& each : thrown) {
    if (each) std::rethrow_exception(each);
  }
  found.erase(std::remove(found.begin(), found.end(), ""), found.end());
  return found;
}

}  // namespace

std::string read_file(const fs::path& path, std::uintmax_t limit) {
  std::error_code error;
  const auto size = fs::file_size(path, error);
  if (error || size > limit) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(path.string(), ": a file of up to ", limit, " bytes was expected, ",
                     error ? error.message() : text(size, " bytes were found")));
  }
  std::string data(static_cast<std::size_t>(size), '\0');
  std::ifstream stream(path, std::ios::binary);
  if (!stream.read(data.data(), static_cast<std::streamsize>(data.size()))) {
    throw Error(HEADPORT_BUNDLE_ERROR, text(path.string(), ": cannot be read"));
  }
  return data;
}

Bundle Bundle::open(const std::string& path, bool verify) {
  const fs::path folder(path);
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(path, ": a bundle folder was expected, nothing is there"));
  }
  const fs::path file = folder / kManifestFile;
  if (!fs::is_regular_file(file, error)) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(path, ": no ", kManifestFile, " in it, so it is not a headport bundle"));
  }
  Bundle bundle(folder, read_manifest(read_file(file, kManifestBytes), file.string()));
  bundle.check(verify);
  return bundle;
}

fs::path Bundle::file(const std::string& name) const {
  if (manifest_.files.count(name) == 0) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(path_.string(), ": the manifest lists no file '", name, "'"));
  }
  return path_ / name;
}

void Bundle::check(bool verify) const {
  std::vector<std::string> faults;
  // Bounds first: a path that leaves the bundle must not even be looked at.
  for (const auto& [name, _] : manifest_.files) {
    const std::string fault = out_of_bounds(path_, name);
    if (!fault.empty()) faults.push_back(fault);
  }
  if (faults.empty()) faults = faults_of(path_, manifest_, verify);
  std::vector<std::string> named;
  for (const Tensor& tensor : manifest_.tensors) named.push_back(tensor.file);
  for (const auto& [_, graph] : manifest_.graphs) named.push_back(graph.file);
  std::sort(named.begin(), named.end());
  named.erase(std::unique(named.begin(), named.end()), named.end());
  for (const std::string& name : named) {
    if (manifest_.files.count(name) == 0) {
      faults.push_back(name + ": used by a graph but not listed in `files`");
    }
  }
  if (faults.empty()) return;
  std::string all;
  for (const std::string& fault : faults) all += (all.empty() ? "" : "; ") + fault;
  throw Error(HEADPORT_BUNDLE_ERROR, text(path_.string(), " is damaged: ", all));
}

}  // namespace headport::internal
