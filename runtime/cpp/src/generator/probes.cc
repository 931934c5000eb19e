#include "generator/probes.h"

#include <algorithm>
#include <cstring>

#include "bundle/ledger.h"
#include "bundle/safetensors.h"
#include "sampling/noise.h"

namespace headport::internal {
namespace {

constexpr const char* kSelftest = "selftest.safetensors";
constexpr std::uintmax_t kSelftestBytes = std::uintmax_t{1} << 30;
constexpr std::size_t kStored = 4;

// Nearly normal: the sum of twelve uniform numbers less six.
std::vector<double> random_row(std::uint64_t row, std::size_t width) {
  std::vector<double> found(width, -6.0);
  for (std::size_t n = 0; n < width; ++n) {
    for (std::uint64_t part = 0; part < 12; ++part) {
      found[n] += draw_bits({17, row, part}, static_cast<std::int64_t>(n)) * 0x1p-32;
    }
  }
  return found;
}

std::vector<double> times(std::vector<double> row, double factor) {
  for (double& each : row) each *= factor;
  return row;
}

void add_stored(const Bundle& bundle, States& found) {
  if (bundle.manifest().files.count(kSelftest) == 0) return;
  const auto path = bundle.file(kSelftest);
  const std::string data = read_file(path, kSelftestBytes);
  const StoredTensor tensor = find_stored(data, "hidden_states", path.string());
  if (tensor.shape.size() != 2 || (tensor.dtype != "F32" && tensor.dtype != "F16")) return;
  const std::size_t width = tensor.shape[1], bytes = tensor.dtype == "F32" ? 4 : 2;
  for (std::size_t row = 0; row < std::min(kStored, tensor.shape[0]); ++row) {
    std::vector<double> values(width);
    for (std::size_t n = 0; n < width; ++n) {
      const char* place = data.data() + tensor.first + (row * width + n) * bytes;
      float single = 0.0f;
      std::uint16_t half = 0;
      if (bytes == 4) std::memcpy(&single, place, sizeof single);
      else std::memcpy(&half, place, sizeof half);
      values[n] = bytes == 4 ? static_cast<double>(single) : from_half(half);
    }
    found.push_back(std::move(values));
  }
}

}  // namespace

States probes_of(const Bundle& bundle, const States& rounded, double largest) {
  const std::size_t width = rounded[0].size();
  States found;
  for (const double factor : {1.0, 30.0, 1e-3, 1e6}) {
    found.push_back(times(random_row(found.size(), width), factor));
  }
  found.emplace_back(width, 0.0);
  found.emplace_back(width, 1e-41);
  std::vector<double> outlier = random_row(4, width), mixed = random_row(5, width);
  outlier[width / 2] = 3e3;
  for (std::size_t n = 0; n < width; n += 3) mixed[n] *= 1e-39;
  found.push_back(std::move(outlier));
  found.push_back(std::move(mixed));
  for (const std::vector<double>& row : rounded) {
    std::vector<double> aligned;
    for (const double each : row) aligned.push_back(each < 0.0 ? -1.0 : 1.0);
    found.push_back(std::move(aligned));
    found.emplace_back(width, 1.0);
  }
  for (std::vector<double>& row : found) row = times(std::move(row), std::min(1.0, largest));
  add_stored(bundle, found);
  return found;
}

}  // namespace headport::internal
