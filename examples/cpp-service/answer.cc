#include "answer.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>

namespace service {
namespace {

using nlohmann::json;

std::string text_of(const json& document) {
  return document.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string unique_id() {
  std::random_device device;
  std::string found = "cmpl-";
  for (int n = 0; n < 4; ++n) {
    char part[9];
    std::snprintf(part, sizeof part, "%08" PRIx32, static_cast<std::uint32_t>(device()));
    found += part;
  }
  return found;
}

json finish_of(headport_finish finish) {
  if (finish == HEADPORT_NOT_FINISHED) return nullptr;
  return finish == HEADPORT_LENGTH ? "length" : "stop";
}

// Of UTF-8: bytes that begin one.
std::size_t characters(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char each) { return (each & 0xC0) != 0x80; }));
}

// A prompt counts once, however many replies it has.
json usage_of(const std::vector<headport::TokenIds>& prompts,
              const std::vector<headport::Reply>& replies) {
  std::size_t asked = 0, made = 0;
  for (const headport::TokenIds& each : prompts) asked += each.size();
  for (const headport::Reply& each : replies) made += each.token_ids.size();
  return {{"prompt_tokens", asked}, {"completion_tokens", made}, {"total_tokens", asked + made}};
}

}  // namespace

Answer::Answer(const std::string& model, const Asked& asked, const Texts& texts)
    : id_(unique_id()),
      model_(model),
      created_(std::chrono::duration_cast<std::chrono::seconds>(
                   std::chrono::system_clock::now().time_since_epoch())
                   .count()),
      token_ids_(asked.token_ids),
      logprobs_(asked.options.logprobs >= 0),
      texts_(texts) {}

json Answer::head() const {
  return {{"id", id_}, {"created", created_}, {"model", model_}, {"object", "text_completion"}};
}

json Answer::choice(std::size_t index, const std::string& text, headport_finish finish,
                    const headport::TokenIds& token_ids,
                    const std::vector<headport::Likelihood>& likelihoods) const {
  json found = {{"index", index},
                {"text", text},
                {"finish_reason", finish_of(finish)},
                {"logprobs", nullptr}};
  if (logprobs_) found["logprobs"] = logprobs(token_ids, likelihoods);
  if (token_ids_) found["token_ids"] = token_ids;
  return found;
}

json Answer::logprobs(const headport::TokenIds& token_ids,
                      const std::vector<headport::Likelihood>& likelihoods) const {
  json tokens = json::array(), own = json::array(), best = json::array(), starts = json::array();
  std::size_t start = 0;  // characters
  for (std::size_t n = 0; n < likelihoods.size(); ++n) {
    const std::string text = texts_.spell(token_ids[n]);
    json top = json::object();
    for (const headport::TopLogprob& each : likelihoods[n].top) {
      top[texts_.spell(each.token_id)] = each.logprob;
    }
    tokens.push_back(text);
    own.push_back(likelihoods[n].logprob);
    best.push_back(std::move(top));
    starts.push_back(start);
    start += characters(text);
  }
  return {{"tokens", tokens}, {"token_logprobs", own}, {"top_logprobs", best},
          {"text_offset", starts}};
}

std::string Answer::whole(const std::vector<headport::TokenIds>& prompts,
                          const std::vector<headport::Reply>& replies) const {
  json document = head();
  json choices = json::array();
  for (const headport::Reply& each : replies) {
    choices.push_back(
        choice(choices.size(), each.text, each.finish, each.token_ids, each.likelihoods));
  }
  document["choices"] = std::move(choices);
  document["usage"] = usage_of(prompts, replies);
  return text_of(document);
}

std::string Answer::part(const Piece& piece) const {
  const bool silent = piece.text.empty() && piece.finish == HEADPORT_NOT_FINISHED;
  if (silent && !token_ids_ && !logprobs_) return {};
  json document = head();
  document["choices"] = json::array(
      {choice(piece.index, piece.text, piece.finish, {piece.token_id}, piece.likelihoods)});
  return text_of(document);
}

std::string Answer::usage_part(const std::vector<headport::TokenIds>& prompts,
                               const std::vector<headport::Reply>& replies) const {
  json document = head();
  document["choices"] = json::array();
  document["usage"] = usage_of(prompts, replies);
  return text_of(document);
}

std::string error_body(const Fault& fault) {
  return text_of({{"error",
                   {{"message", fault.what()},
                    {"type", fault.kind()},
                    {"param", nullptr},
                    {"code", nullptr}}}});
}

}  // namespace service
