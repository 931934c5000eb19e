// The C ABI: nothing thrown leaves this file.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bundle/vocabulary.h"
#include "c_support.h"
#include "error.h"
#include "generator/cancel.h"
#include "generator/generator.h"
#include "generator/options.h"
#include "headport/headport.h"
#include "opened.h"

namespace hi = headport::internal;

struct headport_replies {
  std::vector<hi::Reply> replies;
  bool texts = false;  // whether they have text
  // In the form of the C ABI; `tops` are never moved once pointed at.
  std::vector<std::vector<headport_likelihood>> likelihoods;
  std::vector<std::vector<headport_top_logprob>> tops;
};

namespace {

// A copy that headport_free frees.
void* lent_memory(const void* data, std::size_t size) {
  void* found = std::malloc(size > 0 ? size : 1);
  if (found == nullptr) throw std::bad_alloc();
  if (size > 0) std::memcpy(found, data, size);
  return found;
}

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
                                       "internal error",
                                       "no GPU"};
  const auto place = static_cast<std::size_t>(status);
  return place < sizeof kNames / sizeof kNames[0] ? kNames[place] : "unknown status";
}

const char* headport_last_error(void) { return hi::last_error().c_str(); }

headport_status headport_settings_init(headport_settings* settings, size_t struct_size) {
  return hi::guarded([&] { hi::hand_out(hi::default_settings(), settings, struct_size, "settings"); });
}

headport_status headport_open(const char* bundle, const headport_settings* settings,
                              headport_generator** generator) {
  return hi::guarded([&] {
    hi::require(bundle, "bundle");
    hi::require(generator, "generator");
    *generator = nullptr;
    auto found = std::make_unique<headport_generator>();
    hi::open_generator(bundle, hi::taken(settings, hi::default_settings(), "settings"), *found);
    *generator = found.release();
  });
}

void headport_close(headport_generator* generator) { delete generator; }

headport_status headport_get_info(const headport_generator* generator, headport_info* info,
                                  size_t struct_size) {
  return hi::guarded([&] {
    hi::require(generator, "generator");
    const hi::IdMap& ids = generator->generator->ids();
    const headport_info found{sizeof found,
                              ids.size(),
                              static_cast<std::int64_t>(ids.kept()),
                              generator->generator->max_context(),
                              generator->architecture.c_str(),
                              generator->library ? generator->library->version().c_str() : "",
                              generator->library ? generator->library->api_version() : 0,
                              generator->head_names.data(),
                              generator->head_names.size(),
                              generator->exact ? 1 : 0,
                              generator->condition_size,
                              generator->condition_names.data(),
                              generator->condition_names.size(),
                              generator->threads.count,
                              generator->threads.spinning ? 1 : 0,
                              generator->tuned};
    hi::hand_out(found, info, struct_size, "info");
  });
}

headport_status headport_get_stats(headport_generator* generator, headport_stats* stats,
                                   size_t struct_size) {
  return hi::guarded([&] {
    hi::require(generator, "generator");
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
    found.condition_runs = counted.condition_runs();
    hi::hand_out(found, stats, struct_size, "stats");
  });
}

headport_status headport_encode(const headport_generator* generator, const char* text, int64_t** ids,
                                size_t* count) {
  return hi::guarded([&] {
    hi::require(generator, "generator");
    hi::require(text, "text");
    hi::require(ids, "ids");
    hi::require(count, "count");
    *ids = nullptr;
    *count = 0;
    const std::vector<std::int64_t> found = generator->texts->encode(text);
    *ids = static_cast<int64_t*>(lent_memory(found.data(), found.size() * sizeof(int64_t)));
    *count = found.size();
  });
}

headport_status headport_decode(const headport_generator* generator, headport_ids ids, char** text,
                                size_t* size) {
  return hi::guarded([&] {
    hi::require(generator, "generator");
    if (ids.count > 0) hi::require(ids.ids, "ids");
    hi::require(text, "text");
    hi::require(size, "size");
    *text = nullptr;
    const std::string found = generator->texts->get().decode({ids.ids, ids.count});
    *text = static_cast<char*>(lent_memory(found.c_str(), found.size() + 1));
    *size = found.size();
  });
}

void headport_free(void* memory) { std::free(memory); }

headport_status headport_options_init(const headport_generator* generator,
                                      headport_options* options, size_t struct_size) {
  return hi::guarded([&] {
    hi::require(generator, "generator");
    hi::hand_out(hi::options_of(generator->defaults, *generator->lists), options, struct_size,
             "options");
  });
}

headport_status headport_generate(headport_generator* generator, const headport_ids* prompts,
                                  size_t prompt_count, const headport_options* options,
                                  headport_replies** replies) {
  return hi::guarded([&] {
    hi::require(generator, "generator");
    hi::require(replies, "replies");
    *replies = nullptr;
    if (prompt_count > 0) hi::require(prompts, "prompts");
    std::vector<hi::IdSpan> given;
    for (std::size_t n = 0; n < prompt_count; ++n) {
      if (prompts[n].count > 0) hi::require(prompts[n].ids, "prompts");
      given.emplace_back(prompts[n].ids, prompts[n].count);
    }
    const headport_options wanted =
        hi::taken(options, hi::options_of(generator->defaults, *generator->lists), "options");
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
  return hi::guarded([&] {
    hi::require(replies, "replies");
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
    hi::hand_out(found, reply, struct_size, "reply");
  });
}

void headport_replies_free(headport_replies* replies) { delete replies; }

headport_status headport_cancel_new(headport_cancel** cancel) {
  return hi::guarded([&] {
    hi::require(cancel, "cancel");
    *cancel = new headport_cancel;
  });
}

void headport_cancel_request(headport_cancel* cancel) {
  if (cancel != nullptr) cancel->requested.store(true, std::memory_order_relaxed);
}

void headport_cancel_free(headport_cancel* cancel) { delete cancel; }

}  // extern "C"
