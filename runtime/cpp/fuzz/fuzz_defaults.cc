#include <nlohmann/json.hpp>

#include "error.h"
#include "generator/defaults.h"

// As from a manifest, whose `defaults` are known to be an object.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headport::internal;
  const auto given = nlohmann::json::parse(data, data + size, nullptr, false);
  if (!given.is_object()) return 0;
  try {
    read_defaults(given.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), {});
  } catch (const Error&) {
  }
  return 0;
}
