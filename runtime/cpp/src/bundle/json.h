// JSON that a stranger may have written.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace headport::internal {

// `where` names the file in messages, `kind` what it should be, such as "a headport manifest".
// Errors: HEADPORT_BUNDLE_ERROR if it is no JSON, or nested so deep that work on it could exhaust the
// stack.
nlohmann::json parse_json(const std::string& data, const std::string& where, const char* kind);

}  // namespace headport::internal
