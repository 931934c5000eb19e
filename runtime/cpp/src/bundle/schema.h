// What `manifest.json` may hold: src/headport/manifest.py as a table. Unknown, missing and ill-typed
// fields are refused.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace headport::internal {

constexpr int kSchemaVersion = 1;

// Errors: HEADPORT_BUNDLE_ERROR, naming `where` and the field.
void check_manifest(const nlohmann::json& manifest, const std::string& where);

}  // namespace headport::internal
