// The part of NumPy's file format that a vocabulary map needs: int32, one axis.
// Source: numpy.lib.format, versions 1.0 to 3.0.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace headport::internal {

// `where` names the file in messages.
// Errors: HEADPORT_BUNDLE_ERROR if the data are anything but an int32 array [N].
std::vector<std::int32_t> read_npy_int32(const std::string& data, const std::string& where);

}  // namespace headport::internal
