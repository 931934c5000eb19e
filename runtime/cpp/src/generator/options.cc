#include "generator/options.h"

#include "error.h"
#include "generator/cancel.h"
#include "generator/limits.h"
#include "sampling/filters.h"
#include "text/utf8.h"

namespace headport::internal {
namespace {

headport_ids lent(const Ids& ids) { return {ids.data(), ids.size()}; }

Ids taken(const headport_ids& list, const char* name) {
  if (list.count > 0 && list.ids == nullptr) {
    throw Error(HEADPORT_USAGE_ERROR, text(name, ": a pointer to ", list.count,
                                           " ids was expected, a null pointer was found"));
  }
  return Ids(list.ids, list.ids + list.count);
}

// One row of a table per number that options and `Sampling` have in common.
struct Real {
  double headport_options::*option;
  double Sampling::*field;
  bool filters;  // plays no part where decoding is greedy
};

constexpr Real kReals[] = {
    {&headport_options::temperature, &Sampling::temperature, false},
    {&headport_options::top_p, &Sampling::top_p, true},
    {&headport_options::min_p, &Sampling::min_p, true},
    {&headport_options::typical_p, &Sampling::typical_p, true},
    {&headport_options::epsilon_cutoff, &Sampling::epsilon_cutoff, true},
    {&headport_options::eta_cutoff, &Sampling::eta_cutoff, true},
    {&headport_options::repetition_penalty, &Sampling::repetition_penalty, false},
    {&headport_options::presence_penalty, &Sampling::presence_penalty, false},
    {&headport_options::frequency_penalty, &Sampling::frequency_penalty, false},
};

struct Whole {
  std::int64_t headport_options::*option;
  std::int64_t Sampling::*field;
  bool filters;
};

constexpr Whole kWholes[] = {
    {&headport_options::top_k, &Sampling::top_k, true},
    {&headport_options::no_repeat_ngram_size, &Sampling::no_repeat_ngram_size, false},
    {&headport_options::min_length, &Sampling::min_length, false},
    {&headport_options::min_new_tokens, &Sampling::min_new_tokens, false},
};

headport_context lent_context(const Context& context) {
  return {{context.prompt.data, context.prompt.size},
          {context.tokens.data, context.tokens.size},
          {context.ends.data, context.ends.size},
          context.index,
          static_cast<std::size_t>(context.sample)};
}

void refuse_failed(headport_status status, const char* name, const Context& context) {
  if (status == HEADPORT_OK) return;
  throw Error(status == HEADPORT_CANCELLED ? HEADPORT_CANCELLED : HEADPORT_REQUEST_ERROR,
              text(name, ": the callback of prompt ", context.index, ", step ",
                   context.tokens.size, " failed with status ", static_cast<int>(status)));
}

void take_callbacks(const headport_options& options, Request& request) {
  void* user = options.rules_user;
  if (options.allowed != nullptr) {
    request.sampling.allowed = [call = options.allowed, user](const Context& context) {
      const headport_context lent = lent_context(context);
      headport_ids ids{nullptr, SIZE_MAX};  // as no callback would say it: left alone
      refuse_failed(call(user, &lent, &ids), "allowed", context);
      if (ids.count == SIZE_MAX) return AllowedAnswer{};
      return AllowedAnswer{false, IdSpan(ids.ids, ids.ids == nullptr ? 0 : ids.count)};
    };
  }
  if (options.process_scores != nullptr) {
    request.sampling.process_scores = [call = options.process_scores, user](
                                          const Context& context, double* scores,
                                          const std::int64_t* ids, std::size_t count) {
      const headport_context lent = lent_context(context);
      refuse_failed(call(user, &lent, scores, ids, count), "process_scores", context);
    };
  }
  if (options.on_token != nullptr) {
    request.on_token = [call = options.on_token,
                        user = options.on_token_user](const headport_token& token) {
      return call(user, &token) == 0;
    };
  }
  if (options.cancel != nullptr) request.cancelled = &options.cancel->requested;
}

std::vector<std::string> stop_of(const headport_options& options) {
  if (options.stop_count > 0 && options.stop == nullptr) {
    throw Error(HEADPORT_USAGE_ERROR, "stop: a pointer to texts was expected, a null pointer was "
                                      "found");
  }
  std::vector<std::string> found;
  for (std::size_t n = 0; n < options.stop_count; ++n) {
    const char* each = options.stop[n];
    if (each == nullptr || *each == '\0' || !is_utf8(each)) {
      throw Error(HEADPORT_REQUEST_ERROR,
                  text("stop must be texts of UTF-8 that are not empty; the one at place ", n,
                       " is none"));
    }
    found.emplace_back(each);
  }
  return found;
}

EarlyStopping early_stopping_of(std::int32_t given) {
  constexpr EarlyStopping kKinds[] = {EarlyStopping::kNo, EarlyStopping::kYes,
                                      EarlyStopping::kNever};
  if (given < 0 || given > 2) {
    throw Error(HEADPORT_REQUEST_ERROR,
                text("early_stopping must be HEADPORT_STOP_WHEN_SETTLED, HEADPORT_STOP_EARLY or "
                     "HEADPORT_STOP_NEVER_EARLY, ", given, " was given"));
  }
  return kKinds[given];
}

Sampling sampling_of(const headport_options& options) {
  Sampling found;
  for (const Real& each : kReals) found.*each.field = options.*each.option;
  for (const Whole& each : kWholes) found.*each.field = options.*each.option;
  const bool null_lists = (options.logit_bias == nullptr && options.logit_bias_count > 0) ||
                          (options.bad_words == nullptr && options.bad_words_count > 0);
  if (null_lists) {
    throw Error(HEADPORT_USAGE_ERROR, "logit_bias, bad_words: a pointer was expected, a null "
                                      "pointer was found with a count above 0");
  }
  for (std::size_t n = 0; n < options.logit_bias_count; ++n) {
    const headport_bias& each = options.logit_bias[n];
    found.logit_bias.emplace_back(taken(each.sequence, "logit_bias"), each.bias);
  }
  unite_equal_sequences(found.logit_bias);
  for (std::size_t n = 0; n < options.bad_words_count; ++n) {
    found.bad_words.push_back(taken(options.bad_words[n], "bad_words"));
  }
  found.suppress_tokens = taken(options.suppress_tokens, "suppress_tokens");
  found.begin_suppress_tokens = taken(options.begin_suppress_tokens, "begin_suppress_tokens");
  found.allowed_ids = taken(options.allowed_ids, "allowed_ids");
  return found;
}

void check_beams(const Request& request, const Defaults& defaults) {
  const Beams& beams = request.beams;
  std::string faults;
  const auto add = [&](bool wrong, const std::string& fault) {
    if (wrong) faults = joined(faults, fault);
  };
  const bool given = beams.length_penalty != defaults.beams.length_penalty ||
                     beams.early_stopping != defaults.beams.early_stopping;
  const bool searched = beams.num_beams > 1;
  add(searched && request.sampling.temperature > 0.0,
      text("beam search is greedy: num_beams=", beams.num_beams, " was expected with temperature=0, ",
           request.sampling.temperature, " was found; give temperature=0 or num_beams=1"));
  add(searched && beams.num_beams < request.n,
      text("n must be from 1 to num_beams=", beams.num_beams, ", ", request.n, " was given"));
  add(!searched && given,
      "length_penalty, early_stopping would have no effect without num_beams above 1");
  add(searched && request.logprobs >= 0,
      "logprobs are not given for beams; their replies have a score");
  add(searched && request.on_token,
      "beams have no tokens before their end; leave on_token out");
  if (!faults.empty()) throw Error(HEADPORT_REQUEST_ERROR, faults);
}

// Refuse what is right alone and has no meaning together.
void check_together(const Request& request, const Defaults& defaults) {
  const Sampling& sampling = request.sampling;
  if (sampling.temperature == 0.0) {
    bool ignored = false;
    for (const Real& each : kReals) {
      ignored |= each.filters && sampling.*each.field != defaults.sampling.*each.field;
    }
    for (const Whole& each : kWholes) {
      ignored |= each.filters && sampling.*each.field != defaults.sampling.*each.field;
    }
    if (ignored && filtering(sampling)) {
      throw Error(HEADPORT_REQUEST_ERROR,
                  "the filters (top_k, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff) would "
                  "have no effect, because temperature is 0; give one above 0, such as 1.0");
    }
    if (request.n > 1 && request.beams.num_beams == 1) {
      throw Error(HEADPORT_REQUEST_ERROR,
                  text("n=", request.n, " greedy replies would all be equal; give a temperature "
                       "above 0, or num_beams"));
    }
  }
  check_beams(request, defaults);
  const bool given = sampling.min_new_tokens != defaults.sampling.min_new_tokens;
  if (given && request.explicit_limit && sampling.min_new_tokens > request.max_new_tokens) {
    throw Error(HEADPORT_REQUEST_ERROR,
                text("min_new_tokens=", sampling.min_new_tokens, " is above max_new_tokens=",
                     request.max_new_tokens));
  }
  if (sampling.allowed && !sampling.allowed_ids.empty()) {
    throw Error(HEADPORT_REQUEST_ERROR,
                "allowed_ids would have no effect beside a callback `allowed`; give one of them");
  }
}

std::vector<std::uint64_t> seeds_of(const headport_options& options, std::size_t prompts) {
  if (options.seed_count == 0) return {};
  if (options.seeds == nullptr || (options.seed_count != 1 && options.seed_count != prompts)) {
    throw Error(HEADPORT_REQUEST_ERROR,
                text("one seed, or one for each of the ", prompts, " prompts, was expected; ",
                     options.seeds == nullptr ? 0 : options.seed_count, " were given"));
  }
  std::vector<std::uint64_t> found(options.seeds, options.seeds + options.seed_count);
  found.resize(prompts, found[0]);
  return found;
}

std::vector<Condition> conditions_of(const headport_options& options, std::size_t prompts) {
  const std::size_t count = options.condition_count;
  if (count == 0) return {};
  if (options.conditions == nullptr || (count != 1 && count != prompts)) {
    throw Error(HEADPORT_REQUEST_ERROR,
                text("one condition, or one for each of the ", prompts, " prompts, was expected; ",
                     options.conditions == nullptr ? 0 : count, " were given"));
  }
  std::vector<Condition> found;
  for (std::size_t n = 0; n < count; ++n) {
    const headport_condition& each = options.conditions[n];
    if (each.name != nullptr && each.values != nullptr) {
      throw Error(HEADPORT_REQUEST_ERROR,
                  text("condition ", n, ": a name or values were expected, both were given"));
    }
    if (each.values == nullptr && each.count > 0) {
      throw Error(HEADPORT_USAGE_ERROR, text("condition ", n, ": a pointer to ", each.count,
                                             " values was expected, a null pointer was found"));
    }
    Condition read;
    if (each.name != nullptr) read.name = each.name;
    if (each.values != nullptr) read.values.emplace(each.values, each.values + each.count);
    found.push_back(std::move(read));
  }
  return found;
}

}  // namespace

DefaultLists::DefaultLists(const Defaults& defaults) : defaults_(defaults) {
  for (const std::string& each : defaults.stop) stop_.push_back(each.c_str());
  for (const auto& [words, bias] : defaults.sampling.logit_bias) {
    bias_.push_back({lent(words), bias});
  }
  for (const Ids& words : defaults.sampling.bad_words) bad_words_.push_back(lent(words));
}

void DefaultLists::lend(headport_options& options) const {
  options.logit_bias = bias_.data();
  options.logit_bias_count = bias_.size();
  options.bad_words = bad_words_.data();
  options.bad_words_count = bad_words_.size();
  options.suppress_tokens = lent(defaults_.sampling.suppress_tokens);
  options.begin_suppress_tokens = lent(defaults_.sampling.begin_suppress_tokens);
  options.eos_token_ids = lent(defaults_.ends);
  options.stop = stop_.data();
  options.stop_count = stop_.size();
}

headport_options options_of(const Defaults& defaults, const DefaultLists& lists) {
  headport_options found{};
  found.struct_size = sizeof found;
  for (const Real& each : kReals) found.*each.option = defaults.sampling.*each.field;
  for (const Whole& each : kWholes) found.*each.option = defaults.sampling.*each.field;
  lists.lend(found);
  found.n = defaults.n;
  found.logprobs = -1;
  found.num_beams = defaults.beams.num_beams;
  found.length_penalty = defaults.beams.length_penalty;
  found.early_stopping = static_cast<std::int32_t>(defaults.beams.early_stopping);
  return found;
}

Request resolve(const headport_options& options, const Defaults& defaults, std::size_t prompts,
                std::int64_t vocab_size) {
  Request request;
  request.sampling = sampling_of(options);
  request.sampling.forced_bos = defaults.sampling.forced_bos;  // no options of a call
  request.sampling.forced_eos = defaults.sampling.forced_eos;
  request.n = options.n;
  request.beams = {options.num_beams, options.length_penalty,
                   early_stopping_of(options.early_stopping)};
  const std::string faults =
      joined(joined(faults_of(request.sampling), faults_of(request.beams, request.n)),
             faults_of(options.max_new_tokens, options.logprobs));
  if (!faults.empty()) throw Error(HEADPORT_REQUEST_ERROR, faults);
  request.explicit_limit = options.max_new_tokens > 0;
  request.max_new_tokens =
      request.explicit_limit ? options.max_new_tokens : defaults.max_new_tokens;
  request.max_length = defaults.max_length;
  request.ends = taken(options.eos_token_ids, "eos_token_ids");
  request.logprobs = options.logprobs;
  request.stop = stop_of(options);
  request.texts = options.texts != 0;
  request.seeds = seeds_of(options, prompts);
  request.conditions = conditions_of(options, prompts);
  take_callbacks(options, request);
  check_together(request, defaults);
  check_ids(request.sampling, request.ends, vocab_size, HEADPORT_REQUEST_ERROR);
  return request;
}

}  // namespace headport::internal
