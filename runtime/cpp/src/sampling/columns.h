// Original ids → the columns of a row that stand for them; the end of the past.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "sampling/settings.h"
#include "span.h"

namespace headport::internal {

constexpr double kBanned = -std::numeric_limits<double>::infinity();

// Original id of each column, ascending. Without a list, column v is id v.
class Columns {
 public:
  explicit Columns(std::size_t size) : size_(size) {}
  explicit Columns(const std::vector<std::int64_t>& ids) : size_(ids.size()), ids_(ids.data()) {}

  std::size_t size() const { return size_; }
  const std::int64_t* ids() const { return ids_; }  // null where nothing was pruned
  std::int64_t id(std::size_t column) const {
    return ids_ == nullptr ? static_cast<std::int64_t>(column) : ids_[column];
  }

  // The column of an id, or -1 where it does not exist.
  std::int64_t find(std::int64_t id) const {
    if (ids_ == nullptr) return id >= 0 && static_cast<std::size_t>(id) < size_ ? id : -1;
    const auto* place = std::lower_bound(ids_, ids_ + size_, id);
    return place != ids_ + size_ && *place == id ? place - ids_ : -1;
  }

 private:
  std::size_t size_;
  const std::int64_t* ids_ = nullptr;
};

// Whether the first `count` of some words are the latest tokens; none always are.
inline bool ends_with(const Context& context, const Ids& words, std::size_t count) {
  const std::size_t length = context.length();
  if (length < count) return false;
  for (std::size_t n = 0; n < count; ++n) {
    if (context.at(length - count + n) != words[n]) return false;
  }
  return true;
}

// Counts per column of one row and step, without clearing K numbers each time.
class Tally {
 public:
  void resize(std::size_t columns) {
    epochs_.assign(columns, 0);
    counts_.assign(columns, 0);
    epoch_ = 0;
  }
  void begin() { ++epoch_; }
  // How often a column was counted before.
  std::uint32_t add(std::size_t column) {
    if (epochs_[column] != epoch_) {
      epochs_[column] = epoch_;
      counts_[column] = 0;
    }
    return counts_[column]++;
  }
  // How often a column was counted; 0 from then on.
  std::uint32_t take(std::size_t column) {
    const std::uint32_t count = epochs_[column] == epoch_ ? counts_[column] : 0;
    counts_[column] = 0;
    return count;
  }

 private:
  std::vector<std::uint64_t> epochs_;
  std::vector<std::uint32_t> counts_;
  std::uint64_t epoch_ = 0;
};

}  // namespace headport::internal
