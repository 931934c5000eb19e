#include "bundle/json.h"

#include <nlohmann/json.hpp>

#include "error.h"

namespace headport::internal {
namespace {

using nlohmann::json;

// Writing JSON recurses, and so does reading decoders within decoders.
constexpr int kDeepest = 64;

}  // namespace

json parse_json(const std::string& data, const std::string& where, const char* kind) {
  try {
    return json::parse(data, [&](int depth, json::parse_event_t, json&) {
      if (depth <= kDeepest) return true;
      throw Error(HEADPORT_BUNDLE_ERROR,
                  text(where, ": not ", kind, " (nested more than ", kDeepest, " deep)"));
    });
  } catch (const json::exception& error) {
    throw Error(HEADPORT_BUNDLE_ERROR, text(where, ": not ", kind, " (", error.what(), ")"));
  }
}

}  // namespace headport::internal
