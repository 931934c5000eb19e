#include "answer.h"

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

// A prompt counts once, however many replies it has.
json usage_of(const std::vector<headport::TokenIds>& prompts,
              const std::vector<headport::Reply>& replies) {
  std::size_t asked = 0, made = 0;
  for (const headport::TokenIds& each : prompts) asked += each.size();
  for (const headport::Reply& each : replies) made += each.token_ids.size();
  return {{"prompt_tokens", asked}, {"completion_tokens", made}, {"total_tokens", asked + made}};
}

}  // namespace

Answer::Answer(const std::string& model, bool token_ids)
    : id_(unique_id()),
      model_(model),
      created_(std::chrono::duration_cast<std::chrono::seconds>(
                   std::chrono::system_clock::now().time_since_epoch())
                   .count()),
      token_ids_(token_ids) {}

json Answer::head() const {
  return {{"id", id_}, {"created", created_}, {"model", model_}, {"object", "text_completion"}};
}

std::string Answer::whole(const std::vector<headport::TokenIds>& prompts,
                          const std::vector<headport::Reply>& replies) const {
  json document = head();
  document["choices"] = json::array();
  for (const headport::Reply& each : replies) {
    json choice = {{"index", document["choices"].size()},
                   {"text", ""},
                   {"finish_reason", finish_of(each.finish)},
                   {"logprobs", nullptr}};
    if (token_ids_) choice["token_ids"] = each.token_ids;
    document["choices"].push_back(std::move(choice));
  }
  document["usage"] = usage_of(prompts, replies);
  return text_of(document);
}

std::string Answer::part(const Piece& piece) const {
  json choice = {{"index", piece.index},
                 {"text", ""},
                 {"finish_reason", finish_of(piece.finish)},
                 {"logprobs", nullptr}};
  if (token_ids_) choice["token_ids"] = json::array({piece.token_id});
  json document = head();
  document["choices"] = json::array({std::move(choice)});
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
