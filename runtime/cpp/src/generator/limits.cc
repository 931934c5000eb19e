#include "generator/limits.h"

#include <limits>

#include "error.h"

namespace headport::internal {
namespace {

constexpr double kLeast = std::numeric_limits<double>::denorm_min();  // the smallest above 0
constexpr double kBelow1 = 1.0 - 0x1p-53;
// runtime/limits.py has the same numbers.
constexpr std::int64_t kMostLogprobs = 1000;
constexpr std::int64_t kMostReplies = 10000;
constexpr std::int64_t kMostBeams = 1000;
constexpr double kMostPenalty = 50;

struct Real {
  const char* name;
  double Sampling::*field;
  double low, high;
  const char* expected;
};

constexpr Real kReals[] = {
    {"temperature", &Sampling::temperature, 0.0, 1e30, "a number from 0 (greedy) to 1e30"},
    {"top_p", &Sampling::top_p, 0.0, 1.0, "a number from 0 to 1 (off)"},
    {"min_p", &Sampling::min_p, 0.0, 1.0, "a number from 0 (off) to 1"},
    {"typical_p", &Sampling::typical_p, kLeast, 1.0, "a number above 0, to 1 (off)"},
    {"epsilon_cutoff", &Sampling::epsilon_cutoff, 0.0, kBelow1, "a number from 0 (off), below 1"},
    {"eta_cutoff", &Sampling::eta_cutoff, 0.0, kBelow1, "a number from 0 (off), below 1"},
    {"repetition_penalty", &Sampling::repetition_penalty, 1e-30, 1e30,
     "a number from 1e-30 to 1e30; 1 is off"},
    {"presence_penalty", &Sampling::presence_penalty, -1e30, 1e30, "a finite number; 0 is off"},
    {"frequency_penalty", &Sampling::frequency_penalty, -1e30, 1e30, "a finite number; 0 is off"},
};

struct Whole {
  const char* name;
  std::int64_t Sampling::*field;
};

constexpr Whole kWholes[] = {
    {"top_k", &Sampling::top_k},
    {"no_repeat_ngram_size", &Sampling::no_repeat_ngram_size},
    {"min_length", &Sampling::min_length},
    {"min_new_tokens", &Sampling::min_new_tokens},
};

void add(std::string& faults, const std::string& fault) {
  faults += (faults.empty() ? "" : "; ") + fault;
}

void add_unless(std::string& faults, bool holds, const char* name, const char* expected,
                std::int64_t value) {
  if (!holds) add(faults, text(name, " must be ", expected, ", ", value, " was given"));
}

}  // namespace

std::string faults_of(const Sampling& sampling) {
  std::string faults;
  for (const Real& each : kReals) {
    const double value = sampling.*each.field;
    // NaN fails every comparison, so it is refused as well.
    if (value >= each.low && value <= each.high) continue;
    add(faults, text(each.name, " must be ", each.expected, ", ", value, " was given"));
  }
  for (const Whole& each : kWholes) {
    const std::int64_t value = sampling.*each.field;
    add_unless(faults, value >= 0, each.name, "a whole number from 0 (off) up", value);
  }
  for (const auto& [words, bias] : sampling.logit_bias) {
    if (words.empty() || !(bias >= -1e30 && bias <= 1e30)) {
      add(faults, "logit_bias must be sequences that are not empty, and finite numbers");
    }
  }
  for (const Ids& words : sampling.bad_words) {
    if (words.empty()) add(faults, "bad_words must be token sequences that are not empty");
  }
  return faults;
}

std::string faults_of(const Beams& beams, std::int64_t n) {
  std::string faults;
  add_unless(faults, n >= 1 && n <= kMostReplies, "n",
             text("a whole number from 1 to ", kMostReplies).c_str(), n);
  add_unless(faults, beams.num_beams >= 1 && beams.num_beams <= kMostBeams, "num_beams",
             text("a whole number from 1 (no beam search) to ", kMostBeams).c_str(),
             beams.num_beams);
  if (!(beams.length_penalty >= -kMostPenalty && beams.length_penalty <= kMostPenalty)) {
    add(faults, text("length_penalty must be a number from -", kMostPenalty, " to ", kMostPenalty,
                     ", ", beams.length_penalty, " was given"));
  }
  return faults;
}

std::string faults_of(std::int64_t max_new_tokens, std::int64_t logprobs) {
  std::string faults;
  add_unless(faults, max_new_tokens >= 0, "max_new_tokens",
             "a whole number from 1 up, or 0 for what the bundle says", max_new_tokens);
  add_unless(faults, logprobs >= -1 && logprobs <= kMostLogprobs, "logprobs",
             "a whole number from 0 to 1000, or -1 for none", logprobs);
  return faults;
}

std::string joined(const std::string& one, const std::string& other) {
  return one.empty() || other.empty() ? one + other : one + "; " + other;
}

void check_ids(const Sampling& sampling, const Ids& ends, std::int64_t size,
               headport_status kind) {
  std::string faults;
  auto look = [&](const char* name, IdSpan ids) {
    for (const std::int64_t id : ids) {
      if (id < 0 || id >= size) add(faults, text(name, ": ", id));
    }
  };
  look("eos_token_ids", ends);
  for (const auto& [words, _] : sampling.logit_bias) look("logit_bias", words);
  for (const Ids& words : sampling.bad_words) look("bad_words", words);
  look("suppress_tokens", sampling.suppress_tokens);
  look("begin_suppress_tokens", sampling.begin_suppress_tokens);
  if (sampling.forced_bos) look("forced_bos_token_id", {&*sampling.forced_bos, 1});
  look("forced_eos_token_id", sampling.forced_eos);
  look("allowed_ids", sampling.allowed_ids);
  if (faults.empty()) return;
  throw Error(kind, text("token ids from 0 to ", size - 1, " were expected; found ", faults));
}

}  // namespace headport::internal
