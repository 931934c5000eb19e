// The golden vectors that Python's sampler passes, all of them: `golden_test sampler.json`.
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "check.h"
#include "error.h"
#include "generator/generator.h"
#include "sampling/filters.h"
#include "sampling/noise.h"
#include "sampling/sampler.h"
#include "table_runner.h"

namespace headport::internal {
namespace {

using nlohmann::json;

Ids ids_of(const json& value) { return value.get<Ids>(); }

Sampling sampling_of(const json& options) {
  Sampling found;
  for (const auto& [name, value] : options.items()) {
    if (name == "temperature") found.temperature = value;
    else if (name == "top_k") found.top_k = value;
    else if (name == "top_p") found.top_p = value;
    else if (name == "min_p") found.min_p = value;
    else if (name == "typical_p") found.typical_p = value;
    else if (name == "epsilon_cutoff") found.epsilon_cutoff = value;
    else if (name == "eta_cutoff") found.eta_cutoff = value;
    else if (name == "repetition_penalty") found.repetition_penalty = value;
    else if (name == "presence_penalty") found.presence_penalty = value;
    else if (name == "frequency_penalty") found.frequency_penalty = value;
    else if (name == "no_repeat_ngram_size") found.no_repeat_ngram_size = value;
    else if (name == "min_length") found.min_length = value;
    else if (name == "min_new_tokens") found.min_new_tokens = value;
    else if (name == "allowed") found.allowed_ids = ids_of(value);
    else if (name == "forced_bos") found.forced_bos = value.get<std::int64_t>();
    else if (name == "forced_eos") found.forced_eos = ids_of(value);
    else if (name == "suppress_tokens") found.suppress_tokens = ids_of(value);
    else if (name == "begin_suppress_tokens") found.begin_suppress_tokens = ids_of(value);
    else if (name == "bad_words") {
      for (const json& words : value) found.bad_words.push_back(ids_of(words));
    } else if (name == "logit_bias") {
      for (const json& pair : value) {
        found.logit_bias.emplace_back(ids_of(pair[0]), pair[1].get<double>());
      }
      unite_equal_sequences(found.logit_bias);
    } else {
      CHECK_NAMED(false, "unknown option " + name);
    }
  }
  return found;
}

std::vector<float> floats_of(const json& values) { return values.get<std::vector<float>>(); }

void check_row(const json& row, const Columns& columns, Sampler& sampler) {
  const std::string name = row["name"];
  const auto logits = floats_of(row["logits"]);
  const Sampling sampling = sampling_of(row["options"]);
  const Ids prompt = ids_of(row["prompt"]), tokens = ids_of(row["tokens"]), ends = ids_of(row["eos"]);
  const Context context{prompt, tokens, ends, 0, 0, row.value("limit", std::size_t{0})};
  const AllowedAnswer allowed = ask_allowed(sampling, context);
  const std::vector<double> scores = sampler.process(logits.data(), sampling, allowed, context);
  for (std::size_t n = 0; n < scores.size(); ++n) {
    const json& wanted = row["scores"][n];
    CHECK_NAMED(wanted.is_null() == std::isinf(scores[n]), name);
    if (wanted.is_null()) continue;
    const double value = wanted;
    CHECK_NAMED(std::abs(scores[n] - value) <= 1e-6 + 1e-6 * std::abs(value), name);
  }
  const Ids kept = ids_of(row["kept"]);
  if (kept.empty()) {
    bool refused = false;
    try {
      sampler.choose(logits.data(), sampling, allowed, {}, context);
    } catch (const Error& error) {
      refused = error.status() == HEADPORT_REQUEST_ERROR;
    }
    CHECK_NAMED(refused, name);
    return;
  }
  if (row.contains("greedy")) {
    CHECK_NAMED(sampler.choose(logits.data(), sampling, allowed, {}, context) == row["greedy"], name);
    return;
  }
  for (const json& draw : row["draws"]) {
    const NoiseKey key{draw[0], draw[1], draw[2]};
    CHECK_NAMED(sampler.choose(logits.data(), sampling, allowed, key, context) == draw[3], name);
    if (filtering(sampling)) CHECK_NAMED(sampler.kept().ids == kept, name);
  }
  CHECK_NAMED(columns.size() == logits.size(), name);
}

void check_noise(const json& vector) {
  const NoiseKey key{vector["seed"], vector["step"], vector["sample"]};
  const std::uint32_t bits = draw_bits(key, vector["id"]);
  CHECK(bits == vector["bits"].get<std::uint32_t>());
  CHECK(std::abs(gumbel(bits) - vector["g"].get<double>()) <= 1e-12);
}

void check_generation(const json& wanted, const std::vector<std::vector<float>>& table,
                      Sampler& sampler) {
  const Sampling sampling = sampling_of(wanted["options"]);
  const Ids prompt = ids_of(wanted["prompt"]), ends = ids_of(wanted["eos"]);
  const std::size_t limit = wanted["limit"];
  Ids tokens;
  auto ended = [&] {
    return !tokens.empty() && std::find(ends.begin(), ends.end(), tokens.back()) != ends.end();
  };
  while (tokens.size() < limit && !ended()) {
    const NoiseKey key{wanted.value("seed", std::uint64_t{0}), tokens.size(), 0};
    const std::int64_t last = tokens.empty() ? prompt.back() : tokens.back();
    const auto& logits = table[static_cast<std::size_t>(last)];
    const Context context{prompt, tokens, ends};
    tokens.push_back(
        sampler.choose(logits.data(), sampling, ask_allowed(sampling, context), key, context));
  }
  CHECK_NAMED(tokens == ids_of(wanted["tokens"]), wanted["options"].dump());
}

EarlyStopping early_stopping_of(const json& value) {
  if (value.is_string()) return EarlyStopping::kNever;
  return value.get<bool>() ? EarlyStopping::kYes : EarlyStopping::kNo;
}

// transformers adds in float32, so two sums may change places where they are that near; the vectors
// were made so that none does.
void check_beams(const json& wanted, const std::vector<std::vector<float>>& table) {
  Request request;
  request.beams = {wanted["num_beams"], wanted["length_penalty"],
                   early_stopping_of(wanted["early_stopping"])};
  request.ends = ids_of(wanted["eos"]);
  request.max_new_tokens = wanted["limit"];
  request.explicit_limit = true;
  request.n = request.beams.num_beams;
  const Ids prompt = ids_of(wanted["prompt"]);
  Generator generator(std::make_unique<test::TableRunner>(table),
                      IdMap(static_cast<std::int64_t>(table.size())), 1, 1000);
  const std::vector<Reply> replies = generator.generate({prompt}, request);
  const std::string name = wanted.dump();
  CHECK_NAMED(replies.size() == wanted["replies"].size(), name);
  for (std::size_t n = 0; n < std::min(replies.size(), wanted["replies"].size()); ++n) {
    CHECK_NAMED(replies[n].token_ids == ids_of(wanted["replies"][n]), name);
    const double score = wanted["scores"][n];
    CHECK_NAMED(replies[n].score && std::abs(*replies[n].score - score) <= 1e-4 * std::abs(score),
                name);
    CHECK_NAMED(replies[n].sample == n, name);
  }
}

void run(const char* file) {
  std::ifstream stream(file);
  const json vectors = json::parse(stream);
  const Columns columns(vectors["table"].size());
  Sampler sampler(columns);
  std::vector<std::vector<float>> table;
  for (const json& row : vectors["table"]) table.push_back(floats_of(row));
  for (const json& row : vectors["rows"]) check_row(row, columns, sampler);
  for (const json& noise : vectors["noise"]) check_noise(noise);
  for (const json& each : vectors["generations"]) check_generation(each, table, sampler);
  for (const json& each : vectors["beams"]) check_beams(each, table);
  std::printf("%zu rows, %zu draws of noise, %zu generations, %zu searches\n",
              vectors["rows"].size(), vectors["noise"].size(), vectors["generations"].size(),
              vectors["beams"].size());
}

}  // namespace
}  // namespace headport::internal

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: golden_test sampler.json\n");
    return 2;
  }
  headport::internal::run(arguments[1]);
  return headport::test::result();
}
