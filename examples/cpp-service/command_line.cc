#include "command_line.h"

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <stdexcept>
#include <variant>

namespace service {
namespace {

using Field = std::variant<std::string*, std::int64_t*, double*, std::vector<std::string>*>;

struct Option {
  const char* flag;
  Field field;
  std::int64_t least;  // of numbers
  const char* help;
};

std::vector<Option> options_of(CommandLine& line) {
  Limits& limits = line.limits;
  return {
      {"--host", &line.host, 0, "address to listen on; others than this machine's own are open"},
      {"--port", &line.port, 0, "0 = any free one"},
      {"--name", &line.name, 0, "what clients call the model; else the folder's name"},
      {"--onnxruntime", &line.onnxruntime, 0, "ONNX Runtime's shared library; else $HEADPORT_ORT"},
      {"--tokenizer", &line.tokenizer, 0, "GenAI's, for texts in; else $HEADPORT_TOKENIZER"},
      {"--workers", &line.workers, 1, "requests worked on at once; each worker loads the bundle"},
      {"--threads", &line.threads, 0, "of ONNX Runtime for each worker; 0 = its share of the CPUs"},
      {"--max-context", &line.max_context, 0, "tokens of a prompt and its reply; 0 = the model's"},
      {"--ignore", &line.ignore, 0, "a field of the bundle's generation_config to leave out"},
      {"--max-new-tokens", &limits.new_tokens, 1, "tokens of one reply, at most"},
      {"--max-replies", &limits.replies, 1, "replies to one request, at most"},
      {"--max-body-bytes", &limits.body_bytes, 1, "bytes of one request, at most"},
      {"--max-waiting", &limits.waiting, 1, "requests that may wait before one is refused"},
      {"--timeout", &limits.seconds, 0, "seconds for one request, waiting included"},
      {"--grace", &limits.grace, 0, "seconds that running requests have once it is to stop"},
  };
}

[[noreturn]] void refuse(const Option& option, const char* wanted, const std::string& given) {
  throw std::invalid_argument(std::string(option.flag) + ": " + wanted + " was expected, '" +
                              given + "' was given");
}

std::int64_t whole(const Option& option, const std::string& given) {
  char* end = nullptr;
  errno = 0;
  const long long found = std::strtoll(given.c_str(), &end, 10);
  if (given.empty() || *end != '\0' || errno != 0 || found < option.least) {
    refuse(option, ("a whole number from " + std::to_string(option.least) + " up").c_str(), given);
  }
  return found;
}

double seconds(const Option& option, const std::string& given) {
  constexpr double kLongest = 1e6;  // far inside what a clock counts
  char* end = nullptr;
  const double found = std::strtod(given.c_str(), &end);
  if (given.empty() || *end != '\0' || !(found > 0.0 && found <= kLongest)) {
    refuse(option, "a number of seconds above 0, up to 1e6,", given);
  }
  return found;
}

void take(const Option& option, const std::string& given) {
  if (const auto* text = std::get_if<std::string*>(&option.field)) {
    **text = given;
  } else if (const auto* number = std::get_if<std::int64_t*>(&option.field)) {
    **number = whole(option, given);
  } else if (const auto* duration = std::get_if<double*>(&option.field)) {
    **duration = seconds(option, given);
  } else {
    std::get<std::vector<std::string>*>(option.field)->push_back(given);
  }
}

}  // namespace

std::string usage() {
  CommandLine line;
  std::string text = "usage: headport-service BUNDLE [options]\n";
  for (const Option& each : options_of(line)) {
    const std::string flag = each.flag;
    text += "  " + flag + std::string(18 - flag.size(), ' ') + each.help + "\n";
  }
  return text;
}

CommandLine read_command_line(const std::vector<std::string>& words) {
  CommandLine line;
  const std::vector<Option> options = options_of(line);
  for (std::size_t n = 0; n < words.size(); ++n) {
    const std::string& word = words[n];
    if (word.rfind("--", 0) != 0) {
      if (!line.bundle.empty()) {
        throw std::invalid_argument("one bundle was expected, '" + word + "' was given as well");
      }
      line.bundle = word;
      continue;
    }
    const Option* found = nullptr;
    for (const Option& each : options) {
      if (word == each.flag) found = &each;
    }
    if (found == nullptr) throw std::invalid_argument(word + " is not an option; see --help");
    if (n + 1 == words.size()) throw std::invalid_argument(word + ": a value was expected");
    take(*found, words[++n]);
  }
  if (line.bundle.empty()) {
    throw std::invalid_argument("a bundle's folder was expected, none was given");
  }
  if (line.port > std::numeric_limits<std::uint16_t>::max()) {
    throw std::invalid_argument("--port: a number up to 65535 was expected, " +
                                std::to_string(line.port) + " was given");
  }
  if (line.name.empty()) {
    const auto folder = std::filesystem::weakly_canonical(line.bundle);
    line.name = (folder.has_filename() ? folder : folder.parent_path()).filename().string();
  }
  return line;
}

}  // namespace service
