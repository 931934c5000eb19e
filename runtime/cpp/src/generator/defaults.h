// What a checkpoint's `generation_config` may say, field by field. Mirrors
// runtime/generation_config.py: a field that may change tokens and is not supported is refused.
#pragma once

#include <string>
#include <vector>

#include "generator/request.h"

namespace headport::internal {

// `fields` is a JSON object, as the manifest holds it; `ignore` are fields to leave out.
// Errors: HEADPORT_UNSUPPORTED naming every field that would change tokens and is not supported;
// HEADPORT_BUNDLE_ERROR if one is out of range.
Defaults read_defaults(const std::string& fields, const std::vector<std::string>& ignore);

}  // namespace headport::internal
