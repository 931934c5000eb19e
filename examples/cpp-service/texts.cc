#include "texts.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "fault.h"

namespace service {
namespace {

using nlohmann::json;

// A vocabulary is a mapping of names to ids, or a list of names with scores.
std::unordered_map<std::int64_t, std::string> names_of(const std::filesystem::path& file) {
  std::ifstream stream(file);
  const json tokenizer = json::parse(stream);
  std::unordered_map<std::int64_t, std::string> found;
  const json& vocabulary = tokenizer.at("model").at("vocab");
  std::int64_t place = 0;
  for (const auto& [name, value] : vocabulary.items()) {
    if (vocabulary.is_object()) {
      found[value.get<std::int64_t>()] = name;
    } else {
      found[place++] = value.at(0).get<std::string>();
    }
  }
  for (const json& each : tokenizer.at("added_tokens")) {
    found[each.at("id").get<std::int64_t>()] = each.at("content").get<std::string>();
  }
  return found;
}

}  // namespace

Texts::Texts(const headport::Generator& generator, const std::string& bundle)
    : generator_(generator) {
  try {
    generator.decode({});
    names_ = names_of(std::filesystem::path(bundle) / "tokenizer.json");
  } catch (const std::exception& error) {
    reason_ = error.what();
  }
}

headport::TokenIds Texts::encode(const std::string& text) const {
  try {
    return generator_.encode(text);
  } catch (const std::exception& error) {
    throw wrong_request(std::string("prompt: this text cannot become token ids here (") +
                        error.what() + "); give token ids");
  }
}

std::string Texts::spell(std::int64_t token_id) const {
  const std::string text = generator_.decode({token_id});
  if (!text.empty()) return text;
  const auto found = names_.find(token_id);
  return found == names_.end() ? std::string() : found->second;
}

}  // namespace service
