#include "bundle/vocabulary.h"

#include <algorithm>
#include <numeric>

#include "bundle/npy.h"
#include "error.h"

namespace headport::internal {
namespace {

constexpr std::uintmax_t kMapBytes = std::uintmax_t{1} << 30;

}  // namespace

IdMap::IdMap(std::int64_t size, const std::vector<std::int32_t>& new_to_original,
             const std::string& where)
    : size_(size), kept_(new_to_original.size()) {
  std::vector<std::size_t> order(kept_);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return new_to_original[a] < new_to_original[b];
  });
  for (const std::size_t column : order) ids_.push_back(new_to_original[column]);
  const auto twice = std::adjacent_find(ids_.begin(), ids_.end());
  if (ids_.empty() || ids_.front() < 0 || ids_.back() >= size || twice != ids_.end()) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(where, ": the vocabulary map must name different ids below ", size,
                     twice != ids_.end() ? "; it names some twice" : "; it names others"));
  }
  if (!std::is_sorted(order.begin(), order.end())) columns_ = std::move(order);
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
