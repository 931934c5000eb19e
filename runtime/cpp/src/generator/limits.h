// The ranges of all options, in one table that calls and bundles are held against. Mirrors
// runtime/limits.py.
#pragma once

#include <string>

#include "generator/request.h"

namespace headport::internal {

// What is out of range, all of it; empty where nothing is.
std::string faults_of(const Sampling& sampling);
// The same of the numbers besides `Sampling`.
std::string faults_of(std::int64_t max_new_tokens, std::int64_t n, std::int64_t logprobs);

}  // namespace headport::internal
