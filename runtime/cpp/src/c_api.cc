// The C ABI: nothing thrown leaves this file.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "bundle/bundle.h"
#include "bundle/vocabulary.h"
#include "error.h"
#include "generator/cancel.h"
#include "generator/certificate_check.h"
#include "generator/defaults.h"
#include "generator/generator.h"
#include "generator/in_place_runner.h"
#include "generator/options.h"
#include "headport/headport.h"
#include "ort/library.h"
#include "text/texts.h"

namespace hi = headport::internal;

namespace {

constexpr std::int64_t kMostRows = 16;  // runtime/scheduling/capacity.py has the same number
constexpr std::int64_t kLargestVocabulary = std::int64_t{1} << 31;  // ids of a map are int32
constexpr std::int64_t kLongestContext = std::int64_t{1} << 30;     // graphs count slots in int32

thread_local std::string last_error;

headport_status failed(headport_status status, const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();
  }
  return status;
}

// Runs some work and turns what it throws into a status and a message.
template <typename Work>
headport_status guarded(Work work) noexcept {
  try {
    work();
    return HEADPORT_OK;
  } catch (const hi::Error& error) {
    return failed(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return failed(HEADPORT_OUT_OF_MEMORY, "memory ran out; lower max_rows, max_context or the "
                                          "number of prompts");
  } catch (const std::exception& error) {
    return failed(HEADPORT_INTERNAL_ERROR, error.what());
  } catch (...) {
    return failed(HEADPORT_INTERNAL_ERROR, "an exception of an unknown type");
  }
}

void require(const void* pointer, const char* name) {
  if (pointer == nullptr) {
    throw hi::Error(HEADPORT_USAGE_ERROR, hi::text(name, ": a null pointer was given"));
  }
}

// The first `size` bytes of a struct: as many as the caller's header knows.
template <typename Struct>
void hand_out(Struct found, Struct* target, std::size_t size, const char* name) {
  require(target, name);
  if (size < sizeof found.struct_size || size > sizeof found) {
    throw hi::Error(HEADPORT_USAGE_ERROR,
                    hi::text(name, ": a struct of up to ", sizeof found, " bytes was expected, ",
                             size, " were given; the header is newer than the library"));
  }
  found.struct_size = size;
  std::memcpy(target, &found, size);
}

// What a caller filled; what its header does not know has its default.
template <typename Struct>
Struct taken(const Struct* given, Struct defaults, const char* name) {
  if (given == nullptr) return defaults;
  const std::size_t size = given->struct_size;
  if (size < sizeof size || size > sizeof defaults) {
    throw hi::Error(HEADPORT_USAGE_ERROR,
                    hi::text(name, ": struct_size from ", sizeof size, " to ", sizeof defaults,
                             " was expected, ", size, " was found; fill it with its init function "
                             "first"));
  }
  std::memcpy(&defaults, given, size);
  return defaults;
}

// A copy that headport_free frees.
void* lent_memory(const void* data, std::size_t size) {
  void* found = std::malloc(size > 0 ? size : 1);
  if (found == nullptr) throw std::bad_alloc();
  if (size > 0) std::memcpy(found, data, size);
  return found;
}

headport_settings default_settings() {
  headport_settings found{};
  found.struct_size = sizeof found;
  found.verify = 1;
  found.max_rows = kMostRows;
  found.head = "lm";
  found.exact = HEADPORT_EXACT_AUTO;
  return found;
}

}  // namespace

struct headport_generator {
  hi::Defaults defaults;
  std::unique_ptr<hi::DefaultLists> lists;
  std::shared_ptr<hi::Library> library;
  std::shared_ptr<hi::BundleTexts> texts;
  std::unique_ptr<hi::Generator> generator;
  std::string architecture;
  bool exact = false;
  std::vector<std::string> heads;
  std::vector<const char*> head_names;
  // What the last call of headport_get_stats gave.
  std::vector<std::pair<std::string, hi::Counts>> modes;
  std::vector<headport_mode_counts> lent_modes;
};

struct headport_replies {
  std::vector<hi::Reply> replies;
  bool texts = false;  // whether they have text
  // In the form of the C ABI; `tops` are never moved once pointed at.
  std::vector<std::vector<headport_likelihood>> likelihoods;
  std::vector<std::vector<headport_top_logprob>> tops;
};

namespace {

void lend_likelihoods(headport_replies& found, std::int64_t top) {
  for (const hi::Reply& reply : found.replies) {
    std::vector<headport_top_logprob> lent;
    for (const hi::TopLogprob& each : reply.top) lent.push_back({each.token_id, each.logprob});
    found.tops.push_back(std::move(lent));
    const std::size_t count =
        reply.likelihoods.empty() ? 0 : reply.top.size() / reply.likelihoods.size();
    std::vector<headport_likelihood> rows;
    for (std::size_t n = 0; n < reply.likelihoods.size(); ++n) {
      rows.push_back({reply.likelihoods[n].logprob, reply.likelihoods[n].processed_logprob,
                      top > 0 ? found.tops.back().data() + n * count : nullptr, count});
    }
    found.likelihoods.push_back(std::move(rows));
  }
}

// Whether a head's tokens are to be those of the original one.
bool is_exact(const hi::Bundle& bundle, const std::string& name, std::int32_t wanted) {
  if (wanted < HEADPORT_EXACT_AUTO || wanted > HEADPORT_EXACT_ALWAYS) {
    throw hi::Error(HEADPORT_REQUEST_ERROR,
                    hi::text("exact must be HEADPORT_EXACT_AUTO, _NEVER or _ALWAYS, ", wanted,
                             " was given"));
  }
  const auto head = bundle.manifest().heads.find(name);
  if (head == bundle.manifest().heads.end()) return false;  // refused where it is opened
  const auto& form = head->second.candidates;
  const bool certified = form.has_value() && form->certified;
  if (wanted == HEADPORT_EXACT_ALWAYS && !certified) {
    throw hi::Error(HEADPORT_BUNDLE_ERROR,
                    hi::text(bundle.path().string(), ": exact answers need a certified head, this "
                             "one gives ",
                             form.has_value() ? "candidates without a certificate" : "all logits",
                             "; make the bundle with `headport quantize --head int8 --certify`"));
  }
  return wanted == HEADPORT_EXACT_AUTO ? certified : wanted == HEADPORT_EXACT_ALWAYS;
}

void open_generator(const char* path, const headport_settings& settings,
                    headport_generator& found) {
  const hi::Bundle bundle = hi::Bundle::open(path, settings.verify != 0);
  const hi::Manifest& manifest = bundle.manifest();
  const std::int64_t size = manifest.vocabulary.size;
  if (size < 1 || size > kLargestVocabulary || manifest.max_context < 1 ||
      manifest.max_context > kLongestContext) {
    throw hi::Error(HEADPORT_BUNDLE_ERROR,
                    hi::text(path, ": a vocabulary from 1 to 2^31 and a context from 1 to 2^30 "
                             "were expected, ", size, " and ", manifest.max_context,
                             " were found"));
  }
  if (settings.max_context < 0 || settings.max_context > manifest.max_context) {
    throw hi::Error(HEADPORT_REQUEST_ERROR,
                    hi::text("max_context must be from 1 to the model's ", manifest.max_context,
                             ", or 0 for that; ", settings.max_context, " was given"));
  }
  if (settings.max_rows < 1 || settings.threads < 0) {
    throw hi::Error(HEADPORT_REQUEST_ERROR,
                    hi::text("max_rows must be from 1 up and threads from 0 up, ",
                             settings.max_rows, " and ", settings.threads, " were given"));
  }
  if (settings.reply_limit < 0) {
    throw hi::Error(HEADPORT_REQUEST_ERROR,
                    hi::text("reply_limit must be from 1 up, or 0 for none; ",
                             settings.reply_limit, " was given"));
  }
  if (settings.ignore_count > 0) require(settings.ignore, "ignore");
  std::vector<std::string> ignore;
  for (std::size_t n = 0; n < settings.ignore_count; ++n) {
    require(settings.ignore[n], "ignore");
    ignore.emplace_back(settings.ignore[n]);
  }
  found.architecture = manifest.architecture;
  found.defaults = hi::read_defaults(manifest.defaults, ignore);
  hi::check_ids(found.defaults.sampling, found.defaults.ends, size, HEADPORT_BUNDLE_ERROR);
  found.lists = std::make_unique<hi::DefaultLists>(found.defaults);
  hi::IdMap ids = hi::IdMap::from_bundle(bundle);
  found.library = hi::Library::load(settings.onnxruntime != nullptr ? settings.onnxruntime : "");
  const std::string head = settings.head != nullptr ? settings.head : "lm";
  found.exact = is_exact(bundle, head, settings.exact);
  for (const auto& [name, _] : manifest.heads) found.heads.push_back(name);
  for (const std::string& name : found.heads) found.head_names.push_back(name.c_str());
  auto runner = std::make_unique<hi::InPlaceRunner>(found.library, bundle, head, settings.threads);
  if (found.exact) hi::require_certificate(bundle, head, runner->head());
  found.texts = std::make_shared<hi::BundleTexts>(
      bundle, settings.tokenizer != nullptr ? settings.tokenizer : "", found.library);
  found.generator = std::make_unique<hi::Generator>(
      std::move(runner), std::move(ids), static_cast<std::size_t>(settings.max_rows),
      settings.max_context > 0 ? settings.max_context : manifest.max_context,
      settings.reply_limit, found.exact, found.texts);
}

}  // namespace

extern "C" {

const char* headport_version(void) { return HEADPORT_VERSION; }

uint32_t headport_abi_version(void) { return HEADPORT_ABI_VERSION; }

const char* headport_status_name(headport_status status) {
  static const char* const kNames[] = {"ok",
                                       "usage error",
                                       "library error",
                                       "bundle error",
                                       "unsupported",
                                       "prompt error",
                                       "request error",
                                       "non-finite error",
                                       "cancelled",
                                       "out of memory",
                                       "internal error"};
  const auto place = static_cast<std::size_t>(status);
  return place < sizeof kNames / sizeof kNames[0] ? kNames[place] : "unknown status";
}

const char* headport_last_error(void) { return last_error.c_str(); }

headport_status headport_settings_init(headport_settings* settings, size_t struct_size) {
  return guarded([&] { hand_out(default_settings(), settings, struct_size, "settings"); });
}

headport_status headport_open(const char* bundle, const headport_settings* settings,
                              headport_generator** generator) {
  return guarded([&] {
    require(bundle, "bundle");
    require(generator, "generator");
    *generator = nullptr;
    auto found = std::make_unique<headport_generator>();
    open_generator(bundle, taken(settings, default_settings(), "settings"), *found);
    *generator = found.release();
  });
}

void headport_close(headport_generator* generator) { delete generator; }

headport_status headport_get_info(const headport_generator* generator, headport_info* info,
                                  size_t struct_size) {
  return guarded([&] {
    require(generator, "generator");
    const hi::IdMap& ids = generator->generator->ids();
    const headport_info found{sizeof found,
                              ids.size(),
                              static_cast<std::int64_t>(ids.kept()),
                              generator->generator->max_context(),
                              generator->architecture.c_str(),
                              generator->library->version().c_str(),
                              generator->library->api_version(),
                              generator->head_names.data(),
                              generator->head_names.size(),
                              generator->exact ? 1 : 0};
    hand_out(found, info, struct_size, "info");
  });
}

headport_status headport_get_stats(headport_generator* generator, headport_stats* stats,
                                   size_t struct_size) {
  return guarded([&] {
    require(generator, "generator");
    const hi::Stats& counted = generator->generator->stats();
    generator->modes = counted.modes();
    generator->lent_modes.clear();
    headport_stats found{};
    found.struct_size = sizeof found;
    found.new_tokens = counted.new_tokens();
    for (const auto& [mode, each] : generator->modes) {
      generator->lent_modes.push_back({mode.c_str(), each.certified, each.fallbacks, each.unproved});
      found.certified += each.certified;
      found.fallbacks += each.fallbacks;
      found.unproved += each.unproved;
    }
    found.modes = generator->lent_modes.data();
    found.mode_count = generator->lent_modes.size();
    hand_out(found, stats, struct_size, "stats");
  });
}

headport_status headport_encode(const headport_generator* generator, const char* text, int64_t** ids,
                                size_t* count) {
  return guarded([&] {
    require(generator, "generator");
    require(text, "text");
    require(ids, "ids");
    require(count, "count");
    *ids = nullptr;
    *count = 0;
    const std::vector<std::int64_t> found = generator->texts->encode(text);
    *ids = static_cast<int64_t*>(lent_memory(found.data(), found.size() * sizeof(int64_t)));
    *count = found.size();
  });
}

headport_status headport_decode(const headport_generator* generator, headport_ids ids, char** text,
                                size_t* size) {
  return guarded([&] {
    require(generator, "generator");
    if (ids.count > 0) require(ids.ids, "ids");
    require(text, "text");
    require(size, "size");
    *text = nullptr;
    const std::string found = generator->texts->get().decode({ids.ids, ids.count});
    *text = static_cast<char*>(lent_memory(found.c_str(), found.size() + 1));
    *size = found.size();
  });
}

void headport_free(void* memory) { std::free(memory); }

headport_status headport_options_init(const headport_generator* generator,
                                      headport_options* options, size_t struct_size) {
  return guarded([&] {
    require(generator, "generator");
    hand_out(hi::options_of(generator->defaults, *generator->lists), options, struct_size,
             "options");
  });
}

headport_status headport_generate(headport_generator* generator, const headport_ids* prompts,
                                  size_t prompt_count, const headport_options* options,
                                  headport_replies** replies) {
  return guarded([&] {
    require(generator, "generator");
    require(replies, "replies");
    *replies = nullptr;
    if (prompt_count > 0) require(prompts, "prompts");
    std::vector<hi::IdSpan> given;
    for (std::size_t n = 0; n < prompt_count; ++n) {
      if (prompts[n].count > 0) require(prompts[n].ids, "prompts");
      given.emplace_back(prompts[n].ids, prompts[n].count);
    }
    const headport_options wanted =
        taken(options, hi::options_of(generator->defaults, *generator->lists), "options");
    const hi::Request request = hi::resolve(wanted, generator->defaults, prompt_count,
                                            generator->generator->ids().size());
    auto found = std::make_unique<headport_replies>();
    found->replies = generator->generator->generate(given, request);
    found->texts = request.texts || !request.stop.empty();
    lend_likelihoods(*found, request.logprobs);
    *replies = found.release();
  });
}

size_t headport_replies_count(const headport_replies* replies) {
  return replies == nullptr ? 0 : replies->replies.size();
}

headport_status headport_replies_get(const headport_replies* replies, size_t index,
                                     headport_reply* reply, size_t struct_size) {
  return guarded([&] {
    require(replies, "replies");
    if (index >= replies->replies.size()) {
      throw hi::Error(HEADPORT_USAGE_ERROR,
                      hi::text("index: a number below ", replies->replies.size(),
                               " was expected, ", index, " was given"));
    }
    const hi::Reply& each = replies->replies[index];
    const auto& likelihoods = replies->likelihoods[index];
    const headport_reply found{sizeof found,
                               each.prompt,
                               each.sample,
                               {each.token_ids.data(), each.token_ids.size()},
                               each.finish,
                               each.has_seed ? 1 : 0,
                               each.seed,
                               likelihoods.empty() ? nullptr : likelihoods.data(),
                               replies->texts ? each.text.c_str() : nullptr,
                               each.text.size(),
                               each.score.has_value() ? 1 : 0,
                               each.score.value_or(0.0)};
    hand_out(found, reply, struct_size, "reply");
  });
}

void headport_replies_free(headport_replies* replies) { delete replies; }

headport_status headport_cancel_new(headport_cancel** cancel) {
  return guarded([&] {
    require(cancel, "cancel");
    *cancel = new headport_cancel;
  });
}

void headport_cancel_request(headport_cancel* cancel) {
  if (cancel != nullptr) cancel->requested.store(true, std::memory_order_relaxed);
}

void headport_cancel_free(headport_cancel* cancel) { delete cancel; }

}  // extern "C"
