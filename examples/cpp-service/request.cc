#include "request.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "fault.h"

namespace service {
namespace {

using nlohmann::json;

// Far deeper than a sound request; what is written into a message must not be endless either.
constexpr int kDeepest = 16;
constexpr std::size_t kShown = 60;

std::string shown(const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > kShown) text = text.substr(0, kShown) + "…";
  return text;
}

[[noreturn]] void refuse(const std::string& name, const char* wanted, const json& given) {
  throw wrong_request(name + ": " + wanted + " was expected, " + shown(given) + " was given");
}

std::int64_t whole(const std::string& name, const json& value) {
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || value.get<std::uint64_t>() <= INT64_MAX);
  if (!fits) refuse(name, "a whole number", value);
  return value.get<std::int64_t>();
}

double number(const std::string& name, const json& value) {
  if (!value.is_number()) refuse(name, "a number", value);
  return value.get<double>();
}

bool flag(const std::string& name, const json& value) {
  if (!value.is_boolean()) refuse(name, "true or false", value);
  return value.get<bool>();
}

headport::TokenIds ids(const std::string& name, const json& value) {
  if (!value.is_array()) refuse(name, "a list of token ids", value);
  headport::TokenIds found;
  for (const json& each : value) found.push_back(whole(name, each));
  return found;
}

std::uint64_t seed(const json& value) {
  if (!value.is_number_unsigned()) refuse("seed", "a whole number from 0 to 2^64 - 1", value);
  return value.get<std::uint64_t>();
}

void take_bias(headport::Options& options, const json& value) {
  if (!value.is_object()) refuse("logit_bias", "a mapping such as {\"50\": -1.5}", value);
  std::vector<std::pair<headport::TokenIds, double>> pairs;
  for (const auto& [key, bias] : value.items()) {
    const json id = json::parse(key, nullptr, false);  // JSON has no numbers as keys
    if (!id.is_number_integer()) refuse("logit_bias", "a mapping such as {\"50\": -1.5}", value);
    pairs.push_back({{whole("logit_bias", id)}, number("logit_bias", bias)});
  }
  options.set_logit_bias(std::move(pairs));
}

void take_words(headport::Options& options, const json& value) {
  if (!value.is_array()) refuse("bad_words", "a list of lists of token ids", value);
  std::vector<headport::TokenIds> words;
  for (const json& each : value) words.push_back(ids("bad_words", each));
  options.set_bad_words(std::move(words));
}

void take_stop(headport::Options& options, const json& value) {
  std::vector<std::string> texts;
  for (const json& each : value.is_array() ? value : json::array({value})) {
    if (!each.is_string()) refuse("stop", "a text, or a list of texts,", value);
    texts.push_back(each.get<std::string>());
    if (texts.back().find('\0') != std::string::npos) refuse("stop", "no null character", value);
  }
  options.set_stop(std::move(texts));
}

void take_seeds(headport::Options& options, const json& value) {
  std::vector<std::uint64_t> seeds;
  if (value.is_array()) {
    for (const json& each : value) seeds.push_back(seed(each));
  } else {
    seeds.push_back(seed(value));
  }
  options.set_seeds(std::move(seeds));
}

constexpr const char* kConditions =
    "the name of a stored condition, a list of numbers, or a list with one of them or null for each "
    "prompt";

bool are_numbers(const json& value) {
  return value.is_array() && !value.empty() &&
         std::all_of(value.begin(), value.end(), [](const json& each) { return each.is_number(); });
}

void take_conditions(headport::Options& options, const json& value) {
  std::vector<headport::Condition> found;
  const bool several = value.is_array() && !are_numbers(value);
  if (several && value.empty()) refuse("condition", kConditions, value);
  for (const json& each : several ? value : json::array({value})) {
    if (each.is_null()) {
      found.emplace_back();
    } else if (are_numbers(each)) {
      found.emplace_back(each.get<std::vector<float>>());
    } else if (each.is_string() && each.get<std::string>().find('\0') == std::string::npos) {
      found.emplace_back(each.get<std::string>());
    } else {
      refuse("condition", kConditions, value);
    }
  }
  options.set_conditions(std::move(found));
}

// A list of one is for one prompt, as in Python; the library would take it for all.
void check_conditions(const json& value, std::size_t prompts) {
  if (value.is_array() && !are_numbers(value) && value.size() == 1 && prompts > 1)
    refuse("condition", "one for all prompts, or a list with one for each", value);
}

void take_most(headport::Options& options, const json& value) {
  options.max_new_tokens = whole("max_tokens", value);
  if (options.max_new_tokens < 1) refuse("max_tokens", "a whole number from 1 up", value);
}

void take_logprobs(headport::Options& options, const json& value) {
  options.logprobs = whole("logprobs", value);
  if (options.logprobs < 0) refuse("logprobs", "a whole number from 0 up", value);
}

void take_ends(headport::Options& options, const json& value) {
  options.set_eos_token_ids(value.is_array() ? ids("eos_token_id", value)
                                             : headport::TokenIds{whole("eos_token_id", value)});
}

struct Real {
  const char* name;
  double headport_options::*field;
};

constexpr Real kReals[] = {
    {"temperature", &headport_options::temperature},
    {"top_p", &headport_options::top_p},
    {"min_p", &headport_options::min_p},
    {"typical_p", &headport_options::typical_p},
    {"epsilon_cutoff", &headport_options::epsilon_cutoff},
    {"eta_cutoff", &headport_options::eta_cutoff},
    {"repetition_penalty", &headport_options::repetition_penalty},
    {"presence_penalty", &headport_options::presence_penalty},
    {"frequency_penalty", &headport_options::frequency_penalty},
};

struct Whole {
  const char* name;
  std::int64_t headport_options::*field;
};

constexpr Whole kWholes[] = {
    {"n", &headport_options::n},
    {"top_k", &headport_options::top_k},
    {"min_new_tokens", &headport_options::min_new_tokens},
    {"no_repeat_ngram_size", &headport_options::no_repeat_ngram_size},
};

struct Other {
  const char* name;
  void (*take)(headport::Options&, const json&);
};

constexpr Other kOthers[] = {
    {"max_tokens", take_most},
    {"seed", take_seeds},
    {"stop", take_stop},
    {"logprobs", take_logprobs},
    {"logit_bias", take_bias},
    {"bad_words", take_words},
    {"suppress_tokens",
     [](headport::Options& o, const json& v) { o.set_suppress_tokens(ids("suppress_tokens", v)); }},
    {"begin_suppress_tokens",
     [](headport::Options& o, const json& v) {
       o.set_begin_suppress_tokens(ids("begin_suppress_tokens", v));
     }},
    {"eos_token_id", take_ends},
    {"condition", take_conditions},
};

// Read by hand, below.
constexpr const char* kOwn[] = {"model", "prompt", "stream", "stream_options", "return_token_ids"};
// These say something about the request and ask for nothing.
constexpr const char* kMetadata[] = {"user", "metadata", "safety_identifier", "prompt_cache_key"};

// Not supported: the values that ask for nothing.
const std::vector<std::pair<std::string, std::vector<json>>>& neutral() {
  static const std::vector<std::pair<std::string, std::vector<json>>> found = {
      {"best_of", {1}},  {"echo", {false}},  {"suffix", {""}},
      {"store", {false}}, {"service_tier", {"auto", "default"}}};
  return found;
}

std::vector<std::string> supported() {
  std::vector<std::string> names(std::begin(kOwn), std::end(kOwn));
  for (const Real& each : kReals) names.push_back(each.name);
  for (const Whole& each : kWholes) names.push_back(each.name);
  for (const Other& each : kOthers) names.push_back(each.name);
  std::sort(names.begin(), names.end());
  return names;
}

// Refuses what would be left undone.
void check_fields(const json& body) {
  const std::vector<std::string> known = supported();
  std::string faults;
  for (const auto& [name, value] : body.items()) {
    const bool fine =
        value.is_null() || std::binary_search(known.begin(), known.end(), name) ||
        std::find(std::begin(kMetadata), std::end(kMetadata), name) != std::end(kMetadata);
    if (fine) continue;
    const auto row = std::find_if(neutral().begin(), neutral().end(),
                                  [&, &key = name](const auto& each) { return each.first == key; });
    if (row == neutral().end()) {
      faults += (faults.empty() ? "" : "; ") + name + " is not a field of this endpoint";
    } else if (std::find(row->second.begin(), row->second.end(), value) == row->second.end()) {
      faults += (faults.empty() ? "" : "; ") + name + "=" + shown(value) + " is not supported";
    }
  }
  if (faults.empty()) return;
  std::string names;
  for (const std::string& each : known) names += (names.empty() ? "" : ", ") + each;
  throw wrong_request(faults + "; leave it out. Supported are " + names);
}

json parse(const std::string& body) {
  json found;
  try {
    found = json::parse(body, [](int depth, json::parse_event_t, json&) {
      if (depth > kDeepest) throw wrong_request("the body must be a JSON object: nested too deep");
      return true;
    });
  } catch (const json::exception& error) {
    throw wrong_request(std::string("the body must be a JSON object: ") + error.what());
  }
  if (!found.is_object()) throw wrong_request("the body must be a JSON object: another type came");
  return found;
}

bool are_ids(const json& value) {
  return value.is_array() && std::all_of(value.begin(), value.end(),
                                         [](const json& each) { return each.is_number(); });
}

headport::TokenIds prompt_of(const json& value, const Texts& texts) {
  if (value.is_string()) return texts.encode(value.get<std::string>());
  if (!are_ids(value)) refuse("prompt", "a text, a list of token ids, or a list of those", value);
  return ids("prompt", value);
}

std::vector<headport::TokenIds> prompts_of(const json& value, const Texts& texts) {
  const bool several = value.is_array() && (value.empty() || !are_ids(value));
  if (!several) return {prompt_of(value, texts)};
  std::vector<headport::TokenIds> found;
  for (const json& each : value) found.push_back(prompt_of(each, texts));
  return found;
}

// Without a tokenizer ids go in and out, and nothing else.
void check_texts(const Asked& asked, const Texts& texts) {
  if (texts.known()) return;
  const bool wanted = asked.options.stop_count > 0 || asked.options.logprobs >= 0;
  if (!wanted && asked.token_ids) return;
  throw wrong_request("this service has no texts (" + texts.reason() +
                      "); give return_token_ids: true, and no stop or logprobs");
}

void check_limits(std::size_t prompts, const headport::Options& options, const Limits& limits) {
  std::string faults;
  const auto count = static_cast<std::int64_t>(prompts);
  if (options.n > limits.replies || (options.n > 0 && count > limits.replies / options.n)) {
    faults = std::to_string(prompts) + " prompts times n=" + std::to_string(options.n) +
             " exceed " + std::to_string(limits.replies) + " replies";
  }
  if (options.max_new_tokens > limits.new_tokens) {
    faults += (faults.empty() ? "" : "; ") + std::to_string(options.max_new_tokens) +
              " tokens exceed " + std::to_string(limits.new_tokens) + " per reply";
  }
  if (!faults.empty()) throw wrong_request("this service's limits: " + faults);
}

bool usage_part(const json& value) {
  if (!value.is_object()) refuse("stream_options", "an object", value);
  bool found = false;
  for (const auto& [name, each] : value.items()) {
    if (name != "include_usage") throw wrong_request("stream_options: unknown field " + name);
    found = flag(name, each);
  }
  return found;
}

}  // namespace

Asked read_completion(const std::string& body, headport::Options options, const Texts& texts,
                      const Limits& limits) {
  const json fields = parse(body);
  check_fields(fields);
  const auto given = [&](const char* name) -> const json* {
    const auto found = fields.find(name);
    return found == fields.end() || found->is_null() ? nullptr : &*found;
  };
  Asked asked{{}, {}, std::move(options)};
  if (const json* model = given("model")) {
    if (!model->is_string()) refuse("model", "a text", *model);
    asked.model = model->get<std::string>();
  }
  if (const json* value = given("stream")) asked.stream = flag("stream", *value);
  if (const json* value = given("stream_options")) asked.usage_part = usage_part(*value);
  if (const json* value = given("return_token_ids")) {
    asked.token_ids = flag("return_token_ids", *value);
  }
  for (const Real& each : kReals) {
    if (const json* value = given(each.name)) {
      asked.options.*each.field = number(each.name, *value);
    }
  }
  for (const Whole& each : kWholes) {
    if (const json* value = given(each.name)) asked.options.*each.field = whole(each.name, *value);
  }
  for (const Other& each : kOthers) {
    if (const json* value = given(each.name)) each.take(asked.options, *value);
  }
  const json* prompt = given("prompt");
  asked.prompts = prompts_of(prompt != nullptr ? *prompt : json(), texts);
  if (const json* value = given("condition")) check_conditions(*value, asked.prompts.size());
  asked.options.texts = texts.known() ? 1 : 0;
  check_texts(asked, texts);
  check_limits(asked.prompts.size(), asked.options, limits);
  return asked;
}

}  // namespace service
