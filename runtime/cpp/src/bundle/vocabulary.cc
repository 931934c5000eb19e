#include "bundle/vocabulary.h"

#include <algorithm>
#include <functional>

#include "bundle/npy.h"
#include "error.h"

namespace headport::internal {
namespace {

constexpr std::uintmax_t kMapBytes = std::uintmax_t{1} << 30;

}  // namespace

IdMap::IdMap(std::int64_t size, const std::vector<std::int32_t>& new_to_original,
             const std::string& where)
    : size_(size),
      kept_(new_to_original.size()),
      ids_(new_to_original.begin(), new_to_original.end()) {
  for (const std::int64_t id : ids_) {
    if (id >= 0 && id < size) continue;
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(where, ": ids from 0 to ", size - 1, " expected, ", id,
                     " found; the file was changed, make the bundle again"));
  }
  const auto odd = std::adjacent_find(ids_.begin(), ids_.end(), std::greater_equal<>());
  if (odd != ids_.end()) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(where, ": ascending ids expected, ", odd[0], " and ", odd[1], " found at ",
                     odd - ids_.begin(), "; the file was changed, make the bundle again"));
  }
  if (ids_.empty()) {
    throw Error(HEADPORT_BUNDLE_ERROR, text(where, ": at least one id expected, none found"));
  }
}

IdMap IdMap::from_bundle(const Bundle& bundle) {
  const Vocabulary& vocabulary = bundle.manifest().vocabulary;
  if (!vocabulary.map.has_value()) return IdMap(vocabulary.size);
  const auto path = bundle.file(*vocabulary.map);
  const auto found = read_npy_int32(read_file(path, kMapBytes), path.string());
  if (static_cast<std::int64_t>(found.size()) != vocabulary.kept_size.value_or(-1)) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(path.string(), ": int32 [", vocabulary.kept_size.value_or(-1),
                     "] expected, int32 [", found.size(), "] found"));
  }
  return IdMap(vocabulary.size, found, path.string());
}

}  // namespace headport::internal
