// What a call asks for, and what holds where it says nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "headport/headport.h"
#include "sampling/sampler.h"
#include "sampling/settings.h"

namespace headport::internal {

// What a bundle says.
struct Defaults {
  Sampling sampling;
  std::int64_t max_new_tokens = 0;  // 0: it does not say
  std::int64_t max_length = 0;      // prompt and new tokens together; 0: it does not say
  Ids ends;
  std::int64_t n = 1;
  Beams beams;
  std::vector<std::string> stop;
};

// What a prompt's hidden states are told: a stored condition by its name, or values; neither: nothing.
struct Condition {
  std::optional<std::string> name;
  std::optional<std::vector<float>> values;
};

// A call, checked; the same for all its prompts.
struct Request {
  Sampling sampling;
  std::int64_t max_new_tokens = 0;
  std::int64_t max_length = 0;
  bool explicit_limit = false;  // the call gave max_new_tokens, so it is not cut to the context
  Ids ends;
  std::vector<std::uint64_t> seeds;  // one per prompt; empty: none given
  std::vector<Condition> conditions;  // likewise
  std::int64_t n = 1;
  std::int64_t logprobs = -1;  // -1 = none
  Beams beams;
  std::vector<std::string> stop;  // texts that end a reply
  bool texts = false;             // replies and tokens have their text
  std::function<bool(const headport_token&)> on_token;  // whether to go on
  const std::atomic<bool>* cancelled = nullptr;
};

// Where ids are to be checked, and in what: the name of the option and its ids.
// Errors: `kind`, naming each option with its unknown ids.
void check_ids(const Sampling& sampling, const Ids& ends, std::int64_t size, headport_status kind);

}  // namespace headport::internal
