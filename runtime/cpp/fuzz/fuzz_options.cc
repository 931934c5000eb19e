// Numbers of an options struct as the bytes say, and lists over ids as the bytes say.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "error.h"
#include "generator/options.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headport::internal;
  const Defaults defaults;
  const DefaultLists lists(defaults);
  headport_options options = options_of(defaults, lists);
  std::int64_t ids[32] = {};
  if (size < sizeof ids) return 0;
  std::memcpy(ids, data, sizeof ids);
  data += sizeof ids;
  size -= sizeof ids;
  const auto part = [&](void* target, std::size_t bytes) {
    const std::size_t count = std::min(bytes, size);
    std::memcpy(target, data, count);
    data += count;
    size -= count;
  };
  part(&options.max_new_tokens,
       offsetof(headport_options, logit_bias) - offsetof(headport_options, max_new_tokens));
  part(&options.n, 2 * sizeof options.n);
  part(&options.num_beams,
       offsetof(headport_options, stop) - offsetof(headport_options, num_beams));
  const std::string word(reinterpret_cast<const char*>(ids), static_cast<std::size_t>(ids[6]) % 9);
  const char* stop = word.c_str();
  options.stop = &stop;
  options.stop_count = static_cast<std::size_t>(ids[7]) % 2;
  const headport_bias bias = {{ids, static_cast<std::size_t>(ids[0]) % 32}, options.top_p};
  const headport_ids words = {ids + 8, static_cast<std::size_t>(ids[1]) % 24};
  options.logit_bias = &bias;
  options.logit_bias_count = 1;
  options.bad_words = &words;
  options.bad_words_count = static_cast<std::size_t>(ids[2]) % 2;
  options.suppress_tokens = {ids + 4, static_cast<std::size_t>(ids[3]) % 28};
  const auto* seeds = reinterpret_cast<const std::uint64_t*>(ids);
  options.seeds = ids[4] % 2 == 0 ? seeds : nullptr;
  options.seed_count = static_cast<std::size_t>(ids[5]) % 4;
  const auto* values = reinterpret_cast<const float*>(ids);
  const headport_condition condition = {ids[8] % 2 == 0 ? word.c_str() : nullptr,
                                        ids[9] % 2 == 0 ? values : nullptr,
                                        static_cast<std::size_t>(ids[10]) % 32};
  options.conditions = ids[11] % 2 == 0 ? &condition : nullptr;
  options.condition_count = static_cast<std::size_t>(ids[11]) % 2;
  try {
    resolve(options, defaults, 2, 100);
  } catch (const Error&) {
  }
  return 0;
}
