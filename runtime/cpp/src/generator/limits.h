// The ranges of all options, in one table that calls and bundles are held against. Mirrors
// runtime/limits.py.
#pragma once

#include <string>

#include "generator/request.h"

namespace headport::internal {

// What is out of range, all of it; empty where nothing is.
std::string faults_of(const Sampling& sampling);
// The same of beams and of replies per prompt.
std::string faults_of(const Beams& beams, std::int64_t n);
// The same of the other numbers of a call.
std::string faults_of(std::int64_t max_new_tokens, std::int64_t logprobs);
// Two texts of faults as one.
std::string joined(const std::string& one, const std::string& other);

}  // namespace headport::internal
