// Head columns ↔ original ids. A pruned head has one row per kept token; `vocab_map.npy` says which.
// A stored matrix may be wider than the vocabulary: a padded row is no token.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bundle/bundle.h"

namespace headport::internal {

class IdMap {
 public:
  // Without a map: all ids.
  explicit IdMap(std::int64_t size) : size_(size), kept_(static_cast<std::size_t>(size)) {}
  // Errors: HEADPORT_BUNDLE_ERROR if an id is out of range or not above the one before. Stages write
  // them ascending, so others were not written with this head.
  IdMap(std::int64_t size, const std::vector<std::int32_t>& new_to_original,
        const std::string& where);
  // Reads the map that the manifest names, if any.
  static IdMap from_bundle(const Bundle& bundle);

  std::int64_t size() const { return size_; }       // ids are below this
  std::size_t kept() const { return kept_; }        // ids that exist
  bool pruned() const { return !ids_.empty(); }
  // Original id of each head column, ascending; empty: all.
  const std::vector<std::int64_t>& ids() const { return ids_; }

 private:
  std::int64_t size_;
  std::size_t kept_;
  std::vector<std::int64_t> ids_;
};

}  // namespace headport::internal
