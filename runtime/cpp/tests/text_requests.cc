// Decodes and encodes with a tokenizer, as far as it goes without a bundle:
// `text_requests TOKENIZER.json REQUESTS.json REPLIES.json`; ONNX Runtime is $HEADPORT_ORT.
//
// {"decode": [[ids] …], "encode": [texts …], "stream": [{"ids": [ids], "stop": [texts]} …]}
#include <cstdio>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "error.h"
#include "ort/library.h"
#include "text/text_stream.h"
#include "text/texts.h"

namespace headport::internal {
namespace {

using nlohmann::json;
using Ids = std::vector<std::int64_t>;

std::string read(const char* file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

json streamed(const Texts& texts, const json& request) {
  const auto ids = request["ids"].get<Ids>();
  const auto stop = request["stop"].get<std::vector<std::string>>();
  TextStream stream(texts, stop);
  json parts = json::array();
  for (std::size_t n = 1; n <= ids.size(); ++n) {
    parts.push_back(std::string(stream.push({ids.data(), n})));
  }
  parts.push_back(std::string(stream.finish(ids)));
  return {{"parts", parts}, {"text", stream.text()}, {"stopped", stream.stopped()}};
}

void run(const char* tokenizer, const char* requests, const char* replies) {
  const json asked = json::parse(read(requests));
  const Texts texts(read(tokenizer), tokenizer);
  json found = {{"decode", json::array()}, {"encode", json::array()}, {"stream", json::array()}};
  for (const json& ids : asked["decode"]) found["decode"].push_back(texts.decode(ids.get<Ids>()));
  for (const json& each : asked["stream"]) found["stream"].push_back(streamed(texts, each));
  std::shared_ptr<Library> library;
  if (!asked["encode"].empty()) library = Library::load("");
  for (const json& each : asked["encode"]) {
    found["encode"].push_back(texts.encode(each.get<std::string>(), "", *library));
  }
  std::ofstream(replies) << found.dump() << "\n";
}

}  // namespace
}  // namespace headport::internal

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: text_requests TOKENIZER.json REQUESTS.json REPLIES.json\n");
    return 2;
  }
  try {
    headport::internal::run(arguments[1], arguments[2], arguments[3]);
  } catch (const headport::internal::Error& error) {
    std::fprintf(stderr, "%s: %s\n", headport_status_name(error.status()), error.what());
    return 1;
  }
  return 0;
}
