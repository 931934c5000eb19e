// headport for C++: owners and exceptions around the C ABI of headport.h. Needs C++17.
#pragma once

#include <headport/headport.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace headport {

using TokenIds = std::vector<std::int64_t>;
// What hidden states are told: nothing, a stored condition by its name, or values.
using Condition = std::variant<std::monostate, std::string, std::vector<float>>;

// What a call failed with: what was expected, what was found, what to do.
class Error : public std::runtime_error {
 public:
  explicit Error(headport_status status)
      : std::runtime_error(headport_last_error()), status_(status) {}
  headport_status status() const noexcept { return status_; }

 private:
  headport_status status_;
};

inline void check(headport_status status) {
  if (status != HEADPORT_OK) throw Error(status);
}

// Ends calls that are given it, from any thread. It must outlive them.
class Cancel {
 public:
  Cancel() {
    headport_cancel* made = nullptr;
    check(headport_cancel_new(&made));
    handle_.reset(made);
  }
  void request() noexcept { headport_cancel_request(handle_.get()); }
  headport_cancel* get() const noexcept { return handle_.get(); }

 private:
  struct Free {
    void operator()(headport_cancel* handle) const { headport_cancel_free(handle); }
  };
  std::unique_ptr<headport_cancel, Free> handle_;
};

// Numbers are set as fields, lists and functions by the setters, which keep copies.
class Options : public headport_options {
 public:
  using OnToken = std::function<bool(const headport_token&)>;  // whether to go on
  // The only ids that may follow; nothing: all may.
  using Allowed = std::function<std::optional<TokenIds>(const headport_context&)>;
  // Changes scores of ids in place.
  using Scores = std::function<void(const headport_context&, double* scores,
                                    const std::int64_t* ids, std::size_t count)>;

  explicit Options(const headport_generator* generator)
      : headport_options(), state_(std::make_unique<State>()) {
    check(headport_options_init(generator, this, sizeof(headport_options)));
  }

  void set_seed(std::uint64_t seed) { set_seeds({seed}); }
  void set_seeds(std::vector<std::uint64_t> values) {
    state_->seeds = std::move(values);
    seeds = state_->seeds.data();
    seed_count = state_->seeds.size();
  }
  void set_logit_bias(std::vector<std::pair<TokenIds, double>> pairs) {
    state_->bias = std::move(pairs);
    state_->lent_bias.clear();
    for (const auto& [ids, bias] : state_->bias) state_->lent_bias.push_back({lent(ids), bias});
    logit_bias = state_->lent_bias.data();
    logit_bias_count = state_->lent_bias.size();
  }
  void set_bad_words(std::vector<TokenIds> words) {
    state_->words = std::move(words);
    state_->lent_words.clear();
    for (const TokenIds& ids : state_->words) state_->lent_words.push_back(lent(ids));
    bad_words = state_->lent_words.data();
    bad_words_count = state_->lent_words.size();
  }
  void set_suppress_tokens(TokenIds ids) { suppress_tokens = keep(state_->suppress, ids); }
  void set_begin_suppress_tokens(TokenIds ids) {
    begin_suppress_tokens = keep(state_->begin_suppress, ids);
  }
  void set_allowed_ids(TokenIds ids) { allowed_ids = keep(state_->allowed_ids, ids); }
  void set_eos_token_ids(TokenIds ids) { eos_token_ids = keep(state_->ends, ids); }
  // Texts that end a reply; with them replies have their text.
  void set_stop(std::vector<std::string> values) {
    state_->stop = std::move(values);
    state_->lent_stop.clear();
    for (const std::string& each : state_->stop) state_->lent_stop.push_back(each.c_str());
    stop = state_->lent_stop.data();
    stop_count = state_->lent_stop.size();
  }
  void set_condition(Condition value) { set_conditions({std::move(value)}); }
  // One for each prompt.
  void set_conditions(std::vector<Condition> values) {
    static constexpr float kNoValue = 0.0f;  // a list without values is not nothing
    state_->conditions = std::move(values);
    state_->lent_conditions.clear();
    for (const Condition& each : state_->conditions) {
      headport_condition lent{nullptr, nullptr, 0};
      if (const auto* name = std::get_if<std::string>(&each)) lent.name = name->c_str();
      if (const auto* list = std::get_if<std::vector<float>>(&each)) {
        lent.values = list->empty() ? &kNoValue : list->data();
        lent.count = list->size();
      }
      state_->lent_conditions.push_back(lent);
    }
    conditions = state_->lent_conditions.data();
    condition_count = state_->lent_conditions.size();
  }
  void set_cancel(const Cancel& handle) { cancel = handle.get(); }

  void set_on_token(OnToken call) {
    state_->on_token = std::move(call);
    on_token_user = state_.get();
    on_token = [](void* user, const headport_token* token) -> std::int32_t {
      State& state = *static_cast<State*>(user);
      bool more = false;
      const bool sound = state.holds([&] { more = state.on_token(*token); });
      return sound && more ? 0 : 1;
    };
  }
  void set_allowed(Allowed call) {
    state_->allowed = std::move(call);
    rules_user = state_.get();
    allowed = [](void* user, const headport_context* context, headport_ids* ids) {
      State& state = *static_cast<State*>(user);
      const bool sound = state.holds([&] {
        state.answer = state.allowed(*context);
        if (state.answer.has_value()) *ids = lent(*state.answer);
      });
      return sound ? HEADPORT_OK : HEADPORT_REQUEST_ERROR;
    };
  }
  void set_process_scores(Scores call) {
    state_->scores = std::move(call);
    rules_user = state_.get();
    process_scores = [](void* user, const headport_context* context, double* scores,
                        const std::int64_t* ids, std::size_t count) {
      State& state = *static_cast<State*>(user);
      const bool sound = state.holds([&] { state.scores(*context, scores, ids, count); });
      return sound ? HEADPORT_OK : HEADPORT_REQUEST_ERROR;
    };
  }

  // What a function threw during the last call, thrown again: it cannot pass through C.
  void rethrow() const {
    if (state_->thrown) std::rethrow_exception(std::exchange(state_->thrown, nullptr));
  }

 private:
  struct State {
    std::vector<std::uint64_t> seeds;
    std::vector<std::pair<TokenIds, double>> bias;
    std::vector<headport_bias> lent_bias;
    std::vector<TokenIds> words;
    std::vector<headport_ids> lent_words;
    TokenIds suppress, begin_suppress, allowed_ids, ends;
    std::vector<std::string> stop;
    std::vector<const char*> lent_stop;
    std::vector<Condition> conditions;
    std::vector<headport_condition> lent_conditions;
    OnToken on_token;
    Allowed allowed;
    std::optional<TokenIds> answer;
    Scores scores;
    std::exception_ptr thrown;

    template <typename Call>
    bool holds(Call call) {
      try {
        call();
        return true;
      } catch (...) {
        thrown = std::current_exception();
        return false;
      }
    }
  };

  static headport_ids lent(const TokenIds& ids) { return {ids.data(), ids.size()}; }
  static headport_ids keep(TokenIds& place, TokenIds& ids) {
    place = std::move(ids);
    return lent(place);
  }

  std::unique_ptr<State> state_;
};

struct TopLogprob {
  std::int64_t token_id;
  double logprob;
};

struct Likelihood {
  double logprob;
  double processed_logprob;
  std::vector<TopLogprob> top;
};

struct Reply {
  std::size_t prompt;
  std::size_t sample;
  TokenIds token_ids;
  headport_finish finish;
  std::optional<std::uint64_t> seed;
  std::vector<Likelihood> likelihoods;  // empty where not asked for
  std::string text;                     // likewise
  std::optional<double> score;          // of a beam
};

// How tokens were chosen since a generator was opened, from a head that gives candidates.
struct Stats {
  struct Counts {
    std::int64_t certified = 0, fallbacks = 0, unproved = 0;
  };
  std::int64_t new_tokens = 0;
  Counts all;
  std::map<std::string, Counts> modes;
  std::int64_t condition_runs = 0;  // projections of conditions
};

inline headport_settings default_settings() {
  headport_settings settings;
  check(headport_settings_init(&settings, sizeof settings));
  return settings;
}

// An opened bundle.
class Generator {
 public:
  explicit Generator(const std::string& bundle,
                     const headport_settings& settings = default_settings()) {
    headport_generator* opened = nullptr;
    check(headport_open(bundle.c_str(), &settings, &opened));
    handle_.reset(opened);
  }

  headport_info info() const {
    headport_info found;
    check(headport_get_info(handle_.get(), &found, sizeof found));
    return found;
  }
  // One call at a time.
  Stats stats() const {
    headport_stats raw;
    check(headport_get_stats(handle_.get(), &raw, sizeof raw));
    Stats found{raw.new_tokens, {raw.certified, raw.fallbacks, raw.unproved}, {}, raw.condition_runs};
    for (std::size_t n = 0; n < raw.mode_count; ++n) {
      const headport_mode_counts& each = raw.modes[n];
      found.modes[each.mode] = {each.certified, each.fallbacks, each.unproved};
    }
    return found;
  }
  // Token ids of a text, with the special tokens that the tokenizer itself adds: a prompt.
  TokenIds encode(const std::string& text) const {
    if (text.find('\0') != std::string::npos) {
      throw std::invalid_argument("a text without null characters was expected; give ids");
    }
    std::int64_t* ids = nullptr;
    std::size_t count = 0;
    check(headport_encode(handle_.get(), text.c_str(), &ids, &count));
    const std::unique_ptr<std::int64_t, Free> owned(ids);
    return TokenIds(ids, ids + count);
  }
  // Text of token ids, special tokens left out.
  std::string decode(const TokenIds& ids) const {
    char* text = nullptr;
    std::size_t size = 0;
    check(headport_decode(handle_.get(), {ids.data(), ids.size()}, &text, &size));
    const std::unique_ptr<char, Free> owned(text);
    return std::string(text, size);
  }
  // The bundle's defaults, to be changed.
  Options options() const { return Options(handle_.get()); }

  std::vector<Reply> generate(const std::vector<TokenIds>& prompts, const Options& options) {
    std::vector<headport_ids> lent;
    for (const TokenIds& ids : prompts) lent.push_back({ids.data(), ids.size()});
    headport_replies* raw = nullptr;
    const headport_status status =
        headport_generate(handle_.get(), lent.data(), lent.size(), &options, &raw);
    const std::unique_ptr<headport_replies, FreeReplies> replies(raw);
    options.rethrow();
    check(status);
    std::vector<Reply> found;
    for (std::size_t n = 0; n < headport_replies_count(raw); ++n) found.push_back(copy(raw, n));
    return found;
  }
  std::vector<Reply> generate(const std::vector<TokenIds>& prompts) {
    return generate(prompts, options());
  }
  headport_generator* get() const noexcept { return handle_.get(); }

 private:
  struct Close {
    void operator()(headport_generator* handle) const { headport_close(handle); }
  };
  struct Free {
    void operator()(void* memory) const { headport_free(memory); }
  };
  struct FreeReplies {
    void operator()(headport_replies* handle) const { headport_replies_free(handle); }
  };

  static Reply copy(const headport_replies* replies, std::size_t index) {
    headport_reply raw;
    check(headport_replies_get(replies, index, &raw, sizeof raw));
    Reply reply{raw.prompt, raw.sample, {}, raw.finish, std::nullopt, {}, {}, std::nullopt};
    reply.token_ids.assign(raw.token_ids.ids, raw.token_ids.ids + raw.token_ids.count);
    if (raw.has_seed != 0) reply.seed = raw.seed;
    if (raw.text != nullptr) reply.text.assign(raw.text, raw.text_size);
    if (raw.has_score != 0) reply.score = raw.score;
    if (raw.likelihoods == nullptr) return reply;
    for (std::size_t n = 0; n < raw.token_ids.count; ++n) {
      const headport_likelihood& each = raw.likelihoods[n];
      Likelihood likelihood{each.logprob, each.processed_logprob, {}};
      for (std::size_t rank = 0; rank < each.top_count; ++rank) {
        likelihood.top.push_back({each.top[rank].token_id, each.top[rank].logprob});
      }
      reply.likelihoods.push_back(std::move(likelihood));
    }
    return reply;
  }

  std::unique_ptr<headport_generator, Close> handle_;
};

}  // namespace headport
