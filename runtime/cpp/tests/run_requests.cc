// Runs requests with a bundle, as a program that embeds the library would:
// `run_requests BUNDLE REQUESTS.json REPLIES.json [MAX_ROWS]`; ONNX Runtime is $HEADPORT_ORT.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <headport/headport.hpp>
#include <nlohmann/json.hpp>

namespace {

using headport::TokenIds;
using nlohmann::json;

void read_options(headport::Options& options, const json& given) {
  const auto number = [&](const char* name, auto& field) {
    if (given.contains(name)) field = given[name];
  };
  number("max_new_tokens", options.max_new_tokens);
  number("min_new_tokens", options.min_new_tokens);
  number("temperature", options.temperature);
  number("top_k", options.top_k);
  number("top_p", options.top_p);
  number("min_p", options.min_p);
  number("typical_p", options.typical_p);
  number("epsilon_cutoff", options.epsilon_cutoff);
  number("eta_cutoff", options.eta_cutoff);
  number("repetition_penalty", options.repetition_penalty);
  number("presence_penalty", options.presence_penalty);
  number("frequency_penalty", options.frequency_penalty);
  number("no_repeat_ngram_size", options.no_repeat_ngram_size);
  number("n", options.n);
  number("logprobs", options.logprobs);
  number("num_beams", options.num_beams);
  number("length_penalty", options.length_penalty);
  number("texts", options.texts);
  if (given.contains("early_stopping")) {
    const json& early = given["early_stopping"];
    options.early_stopping = early == "never" ? HEADPORT_STOP_NEVER_EARLY
                             : early == true  ? HEADPORT_STOP_EARLY
                                              : HEADPORT_STOP_WHEN_SETTLED;
  }
  if (given.contains("stop")) options.set_stop(given["stop"]);
  if (given.contains("seed")) {  // one, or one for each prompt
    const json& seed = given["seed"];
    options.set_seeds(seed.is_array() ? seed.get<std::vector<std::uint64_t>>()
                                      : std::vector<std::uint64_t>{seed.get<std::uint64_t>()});
  }
  if (given.contains("bad_words")) options.set_bad_words(given["bad_words"]);
  if (given.contains("suppress_tokens")) options.set_suppress_tokens(given["suppress_tokens"]);
  if (given.contains("begin_suppress_tokens")) {
    options.set_begin_suppress_tokens(given["begin_suppress_tokens"]);
  }
  if (given.contains("allowed")) options.set_allowed_ids(given["allowed"]);
  if (given.contains("logit_bias")) {
    std::vector<std::pair<TokenIds, double>> pairs;
    for (const json& pair : given["logit_bias"]) {
      pairs.emplace_back(pair[0].get<TokenIds>(), pair[1].get<double>());
    }
    options.set_logit_bias(std::move(pairs));
  }
}

headport::Condition condition_of(const json& given) {
  if (given.is_null()) return {};
  if (given.is_string()) return given.get<std::string>();
  return given.get<std::vector<float>>();
}

json reply_of(const headport::Reply& reply) {
  static const char* const kFinish[] = {"none", "eos", "length", "stop"};
  json found = {{"prompt", reply.prompt},
                {"sample", reply.sample},
                {"token_ids", reply.token_ids},
                {"finish_reason", kFinish[reply.finish]},
                {"text", reply.text}};
  if (reply.score) found["score"] = *reply.score;
  for (const headport::Likelihood& each : reply.likelihoods) {
    json top = json::array();
    for (const headport::TopLogprob& rank : each.top) top.push_back({rank.token_id, rank.logprob});
    found["logprobs"].push_back({each.logprob, each.processed_logprob, top});
  }
  return found;
}

// A prompt is a list of ids or a text.
TokenIds prompt_of(const headport::Generator& generator, const json& prompt) {
  return prompt.is_string() ? generator.encode(prompt) : prompt.get<TokenIds>();
}

json counts_of(const headport::Stats::Counts& counts) {
  return {{"certified", counts.certified},
          {"fallbacks", counts.fallbacks},
          {"unproved", counts.unproved}};
}

json stats_of(const headport::Generator& generator) {
  const headport::Stats stats = generator.stats();
  json found = counts_of(stats.all);
  found["new_tokens"] = stats.new_tokens;
  found["condition_runs"] = stats.condition_runs;
  found["modes"] = json::object();
  for (const auto& [mode, counts] : stats.modes) found["modes"][mode] = counts_of(counts);
  return found;
}

int run(const char* bundle, const char* requests, const char* replies, const char* rows) {
  headport_settings settings = headport::default_settings();
  if (rows != nullptr) settings.max_rows = std::atoll(rows);
  const char* threads = std::getenv("HEADPORT_THREADS");
  settings.threads = threads != nullptr ? std::atoi(threads) : 1;
  settings.head = std::getenv("HEADPORT_HEAD");
  if (std::getenv("HEADPORT_VERIFY") != nullptr) settings.verify = std::atoi(std::getenv("HEADPORT_VERIFY"));
  const char* exact = std::getenv("HEADPORT_EXACT");
  if (exact != nullptr) settings.exact = std::atoi(exact);
  headport::Generator generator(bundle, settings);
  const headport_info info = generator.info();
  std::ifstream stream(requests);
  json found = {{"onnxruntime", info.onnxruntime_version},
                {"vocab_size", info.vocab_size},
                {"kept_size", info.kept_size},
                {"requests", json::array()}};
  for (const json& request : json::parse(stream)) {
    headport::Options options = generator.options();
    read_options(options, request["options"]);
    json streamed = json::array();
    const auto listen = [&](const headport_token& token) {
      streamed.push_back({token.prompt, token.sample, token.step, token.token_id,
                          token.text != nullptr ? std::string(token.text, token.text_size) : ""});
      return true;
    };
    if (options.num_beams == 1) options.set_on_token(listen);
    if (request.contains("conditions")) {  // one for all prompts, or one for each
      std::vector<headport::Condition> conditions;
      for (const json& each : request["conditions"]) conditions.push_back(condition_of(each));
      options.set_conditions(std::move(conditions));
    }
    std::vector<TokenIds> prompts;
    for (const json& prompt : request["prompts"]) prompts.push_back(prompt_of(generator, prompt));
    json written = json::array();
    for (const headport::Reply& reply : generator.generate(prompts, options)) {
      written.push_back(reply_of(reply));
    }
    found["requests"].push_back(
        {{"prompts", prompts}, {"replies", written}, {"streamed", streamed}});
  }
  found["stats"] = stats_of(generator);
  found["heads"] = std::vector<std::string>(info.heads, info.heads + info.head_count);
  found["exact"] = info.exact != 0;
  found["threads"] = info.threads;
  found["spinning"] = info.spinning != 0;
  found["tuned"] = info.tuned;
  found["condition_size"] = info.condition_size;
  found["conditions"] =
      std::vector<std::string>(info.conditions, info.conditions + info.condition_count);
  std::ofstream(replies) << found.dump() << "\n";
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) {
    std::fprintf(stderr, "usage: run_requests BUNDLE REQUESTS.json REPLIES.json [MAX_ROWS]\n");
    return 2;
  }
  try {
    return run(arguments[1], arguments[2], arguments[3], count > 4 ? arguments[4] : nullptr);
  } catch (const headport::Error& error) {
    std::fprintf(stderr, "%s: %s\n", headport_status_name(error.status()), error.what());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}
