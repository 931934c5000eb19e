#include "bundle/schema.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "error.h"

namespace headport::internal {
namespace {

using nlohmann::json;

enum class Kind { kText, kWhole, kReal, kFlag, kDimension, kAny, kRecord };
enum class Form { kOne, kNullable, kList, kMap };

struct Record;

struct Field {
  const char* name;
  Kind kind;
  Form form = Form::kOne;
  bool required = true;
  const Record* record = nullptr;
};

struct Record {
  std::vector<Field> fields;
};

constexpr bool kOptional = false;

const Record kLicense{{{"id", Kind::kText, Form::kNullable},
                       {"source", Kind::kText},
                       {"files", Kind::kText, Form::kList}}};
const Record kStage{{{"stage", Kind::kText},
                     {"options", Kind::kAny, Form::kMap},
                     {"versions", Kind::kText, Form::kMap},
                     {"report", Kind::kAny, Form::kMap}}};
const Record kProvenance{{{"checkpoint", Kind::kText},
                          {"format", Kind::kText},
                          {"sha256", Kind::kText},
                          {"stages", Kind::kRecord, Form::kList, true, &kStage}}};
const Record kModel{{{"architecture", Kind::kText},
                     {"hidden_size", Kind::kWhole},
                     {"layers", Kind::kWhole},
                     {"max_context", Kind::kWhole},
                     {"dtype", Kind::kText},
                     {"query_heads", Kind::kWhole, Form::kNullable, kOptional}}};
const Record kPort{{{"name", Kind::kText},
                    {"dtype", Kind::kText},
                    {"shape", Kind::kDimension, Form::kList}}};
const Record kGraph{{{"file", Kind::kText},
                     {"role", Kind::kText},
                     {"inputs", Kind::kRecord, Form::kList, true, &kPort},
                     {"outputs", Kind::kRecord, Form::kList, true, &kPort}}};
const Record kQuantization{{{"format", Kind::kText},
                            {"block", Kind::kWhole, Form::kNullable},
                            {"activations", Kind::kText},
                            {"symmetric", Kind::kFlag, Form::kOne, kOptional},
                            {"rounding", Kind::kText, Form::kOne, kOptional}}};
const Record kStoredMatrix{{{"format", Kind::kText},
                            {"block", Kind::kWhole, Form::kNullable},
                            {"activations", Kind::kText, Form::kNullable, kOptional}}};
const Record kBackbone{{{"matrices", Kind::kRecord, Form::kMap, true, &kStoredMatrix},
                        {"embedding", Kind::kRecord, Form::kMap, true, &kStoredMatrix},
                        {"activations", Kind::kText}}};
const Record kCandidates{{{"count", Kind::kWhole},
                          {"certified", Kind::kFlag},
                          {"bound", Kind::kText, Form::kNullable},
                          {"full", Kind::kText},
                          {"original", Kind::kText},
                          {"original_tied", Kind::kFlag}}};
const Record kHead{{{"graph", Kind::kText},
                    {"outputs", Kind::kText},
                    {"vocab_size", Kind::kWhole},
                    {"scale", Kind::kReal},
                    {"softcap", Kind::kReal, Form::kNullable},
                    {"bias", Kind::kFlag},
                    {"weight", Kind::kText},
                    {"tied", Kind::kFlag},
                    {"quantization", Kind::kRecord, Form::kNullable, true, &kQuantization},
                    {"candidates", Kind::kRecord, Form::kNullable, kOptional, &kCandidates},
                    {"transform", Kind::kText, Form::kNullable, kOptional}}};
const Record kTensor{{{"name", Kind::kText},
                      {"sha256", Kind::kText},
                      {"dtype", Kind::kText},
                      {"shape", Kind::kWhole, Form::kList},
                      {"file", Kind::kText},
                      {"offset", Kind::kWhole},
                      {"length", Kind::kWhole},
                      {"consumers", Kind::kText, Form::kList}}};
const Record kVocabulary{{{"size", Kind::kWhole},
                          {"padded_size", Kind::kWhole},
                          {"kept_size", Kind::kWhole, Form::kNullable},
                          {"map", Kind::kText, Form::kNullable},
                          {"checkpoint_ids", Kind::kText, Form::kNullable, kOptional}}};
const Record kTolerance{{{"hidden_states", Kind::kReal},
                         {"logits", Kind::kReal},
                         {"task_heads", Kind::kReal, Form::kMap, kOptional}}};
const Record kTuning{{{"cpu", Kind::kText},
                      {"cpus", Kind::kWhole},
                      {"instructions", Kind::kText, Form::kList},
                      {"onnxruntime", Kind::kText},
                      {"threads", Kind::kWhole},
                      {"spinning", Kind::kFlag}}};
const Record kFileEntry{{{"sha256", Kind::kText}, {"bytes", Kind::kWhole}}};
const Record kManifest{
    {{"schema_version", Kind::kWhole},
     {"license", Kind::kRecord, Form::kOne, true, &kLicense},
     {"provenance", Kind::kRecord, Form::kOne, true, &kProvenance},
     {"model", Kind::kRecord, Form::kOne, true, &kModel},
     {"graphs", Kind::kRecord, Form::kMap, true, &kGraph},
     {"heads", Kind::kRecord, Form::kMap, true, &kHead},
     {"tensors", Kind::kRecord, Form::kList, true, &kTensor},
     {"vocabulary", Kind::kRecord, Form::kOne, true, &kVocabulary},
     {"defaults", Kind::kAny, Form::kMap},
     {"session_options", Kind::kText, Form::kMap},
     {"target", Kind::kText},
     {"selftest", Kind::kRecord, Form::kNullable, true, &kTolerance},
     {"files", Kind::kRecord, Form::kMap, true, &kFileEntry},
     {"backbone_quantization", Kind::kRecord, Form::kNullable, kOptional, &kBackbone},
     {"tuned", Kind::kRecord, Form::kList, kOptional, &kTuning},
     // Read by name alone: this library runs none of them. `read_manifest` refuses the last two.
     {"task_heads", Kind::kAny, Form::kMap, kOptional},
     {"source", Kind::kAny, Form::kNullable, kOptional},
     {"prefix", Kind::kAny, Form::kNullable, kOptional}}};

bool is_whole(const json& value) {
  if (!value.is_number_integer()) return false;
  return !value.is_number_unsigned() || value.get<std::uint64_t>() <= INT64_MAX;
}

const char* expected(Kind kind) {
  switch (kind) {
    case Kind::kText: return "text";
    case Kind::kWhole: return "a whole number";
    case Kind::kReal: return "a number";
    case Kind::kFlag: return "true or false";
    case Kind::kDimension: return "a whole number or a symbol";
    case Kind::kAny: return "anything";
    case Kind::kRecord: return "an object";
  }
  return "";
}

bool fits(const json& value, Kind kind) {
  switch (kind) {
    case Kind::kText: return value.is_string();
    case Kind::kWhole: return is_whole(value);
    case Kind::kReal: return value.is_number();
    case Kind::kFlag: return value.is_boolean();
    case Kind::kDimension: return value.is_string() || is_whole(value);
    case Kind::kAny: return true;
    case Kind::kRecord: return value.is_object();
  }
  return false;
}

[[noreturn]] void refuse(const std::string& where, const std::string& wanted, const json& found) {
  throw Error(HEADPORT_BUNDLE_ERROR,
              text(where, ": ", wanted, " was expected, ", found.type_name(), " was found"));
}

void check_record(const json& value, const Record& record, const std::string& where);

void check_one(const json& value, const Field& field, const std::string& where) {
  if (!fits(value, field.kind)) refuse(where, expected(field.kind), value);
  if (field.record != nullptr) check_record(value, *field.record, where);
}

void check_field(const json& value, const Field& field, const std::string& where) {
  switch (field.form) {
    case Form::kNullable:
      if (value.is_null()) return;
      [[fallthrough]];
    case Form::kOne:
      check_one(value, field, where);
      return;
    case Form::kList:
      if (!value.is_array()) refuse(where, "a list", value);
      for (std::size_t n = 0; n < value.size(); ++n) {
        check_one(value[n], field, text(where, "[", n, "]"));
      }
      return;
    case Form::kMap:
      if (!value.is_object()) refuse(where, "an object", value);
      for (const auto& [name, each] : value.items()) check_one(each, field, where + "." + name);
      return;
  }
}

void check_record(const json& value, const Record& record, const std::string& where) {
  std::size_t known = 0;
  for (const Field& field : record.fields) {
    const auto found = value.find(field.name);
    if (found == value.end()) {
      if (!field.required) continue;
      throw Error(HEADPORT_BUNDLE_ERROR, text(where, ": the field ", field.name, " is missing"));
    }
    ++known;
    check_field(*found, field, text(where, ".", field.name));
  }
  if (known == value.size()) return;
  for (const auto& [name, _] : value.items()) {
    bool is_known = false;
    for (const Field& field : record.fields) is_known = is_known || name == field.name;
    if (!is_known) {
      throw Error(HEADPORT_BUNDLE_ERROR,
                  text(where, ": no field ", name, " is known; the bundle may be newer than this "
                       "library, or damaged"));
    }
  }
}

}  // namespace

void check_manifest(const json& manifest, const std::string& where) {
  const auto version = manifest.is_object() ? manifest.find("schema_version") : manifest.end();
  if (!manifest.is_object() || version == manifest.end() || !is_whole(*version)) {
    throw Error(HEADPORT_BUNDLE_ERROR, text(where, ": not a headport manifest"));
  }
  if (*version != kSchemaVersion) {
    throw Error(HEADPORT_BUNDLE_ERROR,
                text(where, ": schema version ", kSchemaVersion, " expected, ", version->dump(),
                     " found; use the headport release that wrote it, or export again"));
  }
  check_record(manifest, kManifest, where + ": $");
}

}  // namespace headport::internal
