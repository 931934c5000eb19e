#include "generator/defaults.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "error.h"
#include "generator/limits.h"

namespace headport::internal {
namespace {

using nlohmann::json;

// Neutral values besides null, as JSON; any other value changes tokens and is not supported.
const std::map<std::string, std::set<std::string>> kNeutral = {
    {"constraints", {"[]"}},
    {"custom_generate", {}},
    {"diversity_penalty", {"0.0", "0"}},
    {"dola_layers", {}},
    {"encoder_no_repeat_ngram_size", {"0"}},
    {"encoder_repetition_penalty", {"1.0", "1"}},
    {"exponential_decay_length_penalty", {}},
    {"force_words_ids", {"[]"}},
    {"guidance_scale", {"1.0", "1"}},
    {"max_time", {}},
    {"num_beam_groups", {"1"}},
    {"penalty_alpha", {"0.0", "0"}},
    {"token_healing", {"false"}},
    {"top_h", {}},
    {"watermarking_config", {}},
};

// These choose what is returned, how fast it is computed, or belong to encoders and assistants,
// which do not exist where the fields above are neutral.
const std::set<std::string> kIgnored = {
    "_commit_hash", "_from_model_config", "assistant_confidence_threshold", "assistant_early_exit",
    "assistant_ensemble_weight", "assistant_lookbehind", "bos_token_id", "cache_config",
    "cache_implementation", "compile_config", "continuous_batching_config",
    "decoder_start_token_id", "disable_compile", "is_assistant", "low_memory", "max_cache_len", "max_matching_ngram_size",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions",
    "output_hidden_states", "output_logits", "output_scores", "pad_token_id", "prefill_chunk_size",
    "prompt_lookup_num_tokens", "remove_invalid_values", "renormalize_logits",
    "return_dict_in_generate", "speculation_type", "target_lookbehind", "transformers_version",
    "use_cache", "use_mtp",
};

[[noreturn]] void refuse(const std::string& name, const char* expected, const json& value) {
  throw Error(HEADPORT_BUNDLE_ERROR, text("the bundle's generation_config is wrong: ", name,
                                          " must be ", expected, ", ", value.dump(), " was found"));
}

std::int64_t whole(const std::string& name, const json& value) {
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || value.get<std::uint64_t>() <= INT64_MAX);
  if (!fits) refuse(name, "a whole number", value);
  return value;
}

std::int64_t positive(const std::string& name, const json& value) {
  const std::int64_t found = whole(name, value);
  if (found < 1) refuse(name, "a whole number from 1 up", value);
  return found;
}

double real(const std::string& name, const json& value) {
  if (!value.is_number()) refuse(name, "a number", value);
  return value;
}

bool flag(const std::string& name, const json& given) {
  const auto found = given.find(name);
  if (found == given.end() || found->is_null()) return false;
  if (!found->is_boolean()) refuse(name, "true or false", *found);
  return found->get<bool>();
}

Ids id_list(const std::string& name, const json& value) {
  if (!value.is_array()) refuse(name, "a list of token ids", value);
  Ids found;
  for (const json& each : value) found.push_back(whole(name, each));
  return found;
}

void read_length_penalty(Defaults& defaults, const std::string& name, const json& value) {
  defaults.beams.length_penalty = real(name, value);
}

void read_early_stopping(Defaults& defaults, const std::string& name, const json& value) {
  if (value == "never") {
    defaults.beams.early_stopping = EarlyStopping::kNever;
  } else if (value.is_boolean()) {
    defaults.beams.early_stopping = value.get<bool>() ? EarlyStopping::kYes : EarlyStopping::kNo;
  } else {
    refuse(name, "true, false or \"never\"", value);
  }
}

void read_stop(Defaults& defaults, const std::string& name, const json& value) {
  for (const json& each : value.is_array() ? value : json::array({value})) {
    if (!each.is_string() || each == "") refuse(name, "texts that are not empty", value);
    defaults.stop.push_back(each.get<std::string>());
  }
}

using Reader = void (*)(Defaults&, const std::string& name, const json& value);

template <double Sampling::*Field>
void read_real(Defaults& defaults, const std::string& name, const json& value) {
  defaults.sampling.*Field = real(name, value);
}

template <std::int64_t Sampling::*Field>
void read_whole(Defaults& defaults, const std::string& name, const json& value) {
  defaults.sampling.*Field = whole(name, value);
}

template <Ids Sampling::*Field>
void read_ids(Defaults& defaults, const std::string& name, const json& value) {
  defaults.sampling.*Field = id_list(name, value);
}

template <std::int64_t Defaults::*Field>
void read_count(Defaults& defaults, const std::string& name, const json& value) {
  defaults.*Field = positive(name, value);
}

void read_bad_words(Defaults& defaults, const std::string& name, const json& value) {
  if (!value.is_array()) refuse(name, "a list of token sequences", value);
  for (const json& words : value) defaults.sampling.bad_words.push_back(id_list(name, words));
}

void read_bias(Defaults& defaults, const std::string& name, const json& value) {
  if (!value.is_array()) refuse(name, "pairs of token sequences and numbers", value);
  for (const json& pair : value) {
    if (!pair.is_array() || pair.size() != 2) refuse(name, "a pair", pair);
    const Ids words = pair[0].is_array() ? id_list(name, pair[0]) : Ids{whole(name, pair[0])};
    defaults.sampling.logit_bias.emplace_back(words, real(name, pair[1]));
  }
  unite_equal_sequences(defaults.sampling.logit_bias);
}

Ids one_or_several(const std::string& name, const json& value) {
  return value.is_array() ? id_list(name, value) : Ids{whole(name, value)};
}

void read_ends(Defaults& defaults, const std::string& name, const json& value) {
  defaults.ends = one_or_several(name, value);
}

const std::map<std::string, Reader> kUsed = {
    {"bad_words_ids", read_bad_words},
    {"begin_suppress_tokens", read_ids<&Sampling::begin_suppress_tokens>},
    {"do_sample", [](Defaults&, const std::string&, const json&) {}},  // read first of all
    {"early_stopping", read_early_stopping},
    {"eos_token_id", read_ends},
    {"epsilon_cutoff", read_real<&Sampling::epsilon_cutoff>},
    {"eta_cutoff", read_real<&Sampling::eta_cutoff>},
    {"forced_bos_token_id",
     [](Defaults& defaults, const std::string& name, const json& value) {
       defaults.sampling.forced_bos = whole(name, value);
     }},
    {"forced_eos_token_id",
     [](Defaults& defaults, const std::string& name, const json& value) {
       defaults.sampling.forced_eos = one_or_several(name, value);
     }},
    {"frequency_penalty", read_real<&Sampling::frequency_penalty>},
    {"length_penalty", read_length_penalty},
    {"max_length", read_count<&Defaults::max_length>},
    {"max_new_tokens", read_count<&Defaults::max_new_tokens>},
    {"min_length", read_whole<&Sampling::min_length>},
    {"min_new_tokens", read_whole<&Sampling::min_new_tokens>},
    {"min_p", read_real<&Sampling::min_p>},
    {"no_repeat_ngram_size", read_whole<&Sampling::no_repeat_ngram_size>},
    {"num_beams",
     [](Defaults& defaults, const std::string& name, const json& value) {
       defaults.beams.num_beams = positive(name, value);
     }},
    {"num_return_sequences", read_count<&Defaults::n>},
    {"presence_penalty", read_real<&Sampling::presence_penalty>},
    {"repetition_penalty", read_real<&Sampling::repetition_penalty>},
    {"sequence_bias", read_bias},
    {"stop_strings", read_stop},
    {"suppress_tokens", read_ids<&Sampling::suppress_tokens>},
    {"temperature", read_real<&Sampling::temperature>},
    {"top_k", read_whole<&Sampling::top_k>},
    {"top_p", read_real<&Sampling::top_p>},
    {"typical_p", read_real<&Sampling::typical_p>},
};

bool changes_tokens(const std::string& name, const json& value) {
  if (kUsed.count(name) > 0 || kIgnored.count(name) > 0) return false;
  const auto neutral = kNeutral.find(name);
  return neutral == kNeutral.end() || neutral->second.count(value.dump()) == 0;
}

}  // namespace

Defaults read_defaults(const std::string& fields, const std::vector<std::string>& ignore) {
  json given = json::parse(fields);
  for (const std::string& name : ignore) given.erase(name);
  const bool samples = flag("do_sample", given);
  const auto beams = given.find("num_beams");
  const bool sampled_beams =
      samples && beams != given.end() && !beams->is_null() && *beams != 1;
  std::string refused;
  for (const auto& [name, value] : given.items()) {
    const bool together = sampled_beams && (name == "do_sample" || name == "num_beams");
    if (value.is_null() || !(together || changes_tokens(name, value))) continue;
    refused += (refused.empty() ? "" : ", ") + name + "=" + value.dump();
  }
  if (!refused.empty()) {
    throw Error(HEADPORT_UNSUPPORTED,
                text("the bundle's generation_config asks for ", refused,
                     ", which this library does not support and which may change the tokens; to "
                     "run without, name the fields in the settings' `ignore`"));
  }
  Defaults found;
  if (samples) found.sampling.temperature = 1.0;
  for (const auto& [name, value] : given.items()) {
    const auto reader = kUsed.find(name);
    if (value.is_null() || reader == kUsed.end()) continue;
    reader->second(found, name, value);
  }
  const std::string faults =
      joined(faults_of(found.sampling), faults_of(found.beams, found.n));
  if (!faults.empty()) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text("the bundle's generation_config is wrong: ", faults));
  }
  if (!samples) found.sampling.temperature = 0.0;
  return found;
}

}  // namespace headport::internal
