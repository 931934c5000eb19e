/* headport: runs bundles of language models on ONNX Runtime or TensorRT. Token ids in, token ids out; texts
 * where a bundle's tokenizer is of a kind that is known.
 *
 * The C ABI. `headport.hpp` wraps it for C++; docs/cpp.md has the rules on memory and threads.
 *
 * Functions that can fail return a status; headport_last_error() then says what was expected, what
 * was found and what to do. Structs begin with their size, are filled by an init function, and grow
 * only at their end. All ids are the ids of the original vocabulary. Strings are UTF-8.
 */
#ifndef HEADPORT_HEADPORT_H
#define HEADPORT_HEADPORT_H

#include <stddef.h>
#include <stdint.h>

#define HEADPORT_ABI_VERSION 1

#if defined(HEADPORT_STATIC)
#define HEADPORT_API
#elif defined(__GNUC__)
#define HEADPORT_API __attribute__((visibility("default")))
#else
#define HEADPORT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum headport_status {
  HEADPORT_OK = 0,
  HEADPORT_USAGE_ERROR = 1,      /* the call itself is wrong: a null pointer, a struct's size */
  HEADPORT_LIBRARY_ERROR = 2,    /* ONNX Runtime or TensorRT is missing, too old, or failed */
  HEADPORT_BUNDLE_ERROR = 3,     /* the bundle is missing, damaged, or none at all */
  HEADPORT_UNSUPPORTED = 4,      /* the bundle is sound and needs what this library lacks */
  HEADPORT_PROMPT_ERROR = 5,     /* a prompt is empty, holds unknown ids, or is too long */
  HEADPORT_REQUEST_ERROR = 6,    /* an option is out of range, or the rules ban every token */
  HEADPORT_NON_FINITE_ERROR = 7, /* the model gave logits that are NaN or infinite */
  HEADPORT_CANCELLED = 8,
  HEADPORT_OUT_OF_MEMORY = 9,
  HEADPORT_INTERNAL_ERROR = 10,
  HEADPORT_NO_GPU = 11 /* the bundle's TensorRT plans need a GPU or a driver that is not here */
} headport_status;

typedef enum headport_finish {
  HEADPORT_NOT_FINISHED = 0,
  HEADPORT_EOS = 1,   /* an end token, which is the last of the reply's ids */
  HEADPORT_LENGTH = 2, /* max_new_tokens are there */
  HEADPORT_STOP = 3    /* a stop text is complete; the text ends before it */
} headport_finish;

/* When a beam search ends that has num_beams complete replies. */
typedef enum headport_early_stopping {
  HEADPORT_STOP_WHEN_SETTLED = 0, /* the best open beam, at its length now, cannot beat the worst */
  HEADPORT_STOP_EARLY = 1,        /* at once */
  HEADPORT_STOP_NEVER_EARLY = 2   /* not at the length that suits it best either */
} headport_early_stopping;

typedef enum headport_exact {
  HEADPORT_EXACT_AUTO = -1,  /* where the head is certified */
  HEADPORT_EXACT_NEVER = 0,
  HEADPORT_EXACT_ALWAYS = 1
} headport_exact;

/* Whether ONNX Runtime's threads are those that `headport tune` recorded in the bundle. */
typedef enum headport_tuned {
  HEADPORT_TUNED_ELSEWHERE = -1, /* it recorded some, for other kinds of machine than this one */
  HEADPORT_NOT_TUNED = 0,        /* it recorded none, or the caller named a number */
  HEADPORT_TUNED_HERE = 1        /* they are */
} headport_tuned;

typedef struct headport_generator headport_generator; /* an opened bundle */
typedef struct headport_replies headport_replies;     /* what a call of generate gave */
typedef struct headport_cancel headport_cancel;       /* ends a call from another thread */

/* Token ids that the caller, or the object they came from, owns. */
typedef struct headport_ids {
  const int64_t* ids;
  size_t count;
} headport_ids;

/* A number added to the score of a sequence's last id, where its other ids are the latest tokens. */
typedef struct headport_bias {
  headport_ids sequence;
  double bias;
} headport_bias;

/* What hidden states are told before the head, where a bundle takes conditions: a stored one by its
 * name, or values [count]. Neither: nothing, as without it. */
typedef struct headport_condition {
  const char* name;    /* NULL: values */
  const float* values; /* NULL: a name */
  size_t count;
} headport_condition;

/* How a bundle is opened. */
typedef struct headport_settings {
  size_t struct_size;
  const char* onnxruntime;   /* its shared library; NULL: $HEADPORT_ORT, else the system's */
  int32_t threads;           /* of ONNX Runtime; 0 = as the bundle records for this kind of machine
                              * (`headport tune`), else one per CPU that this process may use */
  int32_t verify;            /* 1: compare each file's checksum; 0: presence and size only */
  int64_t max_context;       /* tokens of a prompt and its reply; 0 = the model's own limit */
  int64_t max_rows;          /* sequences that are worked on at once; others wait */
  const char* head;          /* the head that tokens are chosen with */
  const char* const* ignore; /* fields of generation_config to leave out, supported or not */
  size_t ignore_count;
  int64_t reply_limit; /* most tokens of a reply where the call names no number; 0 = none */
  /* For a head that gives candidates, a headport_exact. Always: every token is the one that the
   * original, unquantised head would give; what the candidates do not prove takes the full product
   * and is counted. Never: that is chosen from the rescored quantised logits. */
  int32_t exact;
  /* ONNX Runtime GenAI's shared library, which encodes texts; NULL: $HEADPORT_TOKENIZER. It is loaded
   * when a text is first encoded. */
  const char* tokenizer;
  /* For bundles of TensorRT plans. They load no ONNX Runtime unless it is named. */
  const char* tensorrt; /* its shared library; NULL: $HEADPORT_TENSORRT, else the system's */
  int32_t cuda_graphs;  /* 1: TensorRT-RTX records runs as CUDA graphs and replays them */
} headport_settings;

/* What an opened bundle is. Strings live as long as the generator. */
typedef struct headport_info {
  size_t struct_size;
  int64_t vocab_size;              /* ids are below this */
  int64_t kept_size;               /* ids that can be chosen; less where the head is pruned */
  int64_t max_context;             /* tokens */
  const char* architecture;        /* of the checkpoint */
  const char* onnxruntime_version; /* of the library that was loaded; empty where none was */
  uint32_t onnxruntime_api;        /* the version of its C API that is used; 0 */
  const char* const* heads;        /* names of the bundle's heads */
  size_t head_count;
  int32_t exact;                   /* whether tokens are those of the original head */
  int64_t condition_size;          /* values of a condition; 0: the bundle takes none */
  const char* const* conditions;   /* names of those that are stored */
  size_t condition_count;
  int32_t threads;  /* of ONNX Runtime; 0 for bundles of plans */
  int32_t spinning; /* whether they wait for the next operator by spinning */
  int32_t tuned;    /* a headport_tuned */
} headport_info;

/* How tokens of one mode were chosen, from a head that gives candidates. */
typedef struct headport_mode_counts {
  const char* mode;  /* greedy, temperature or the first filter, and whether processors act */
  int64_t certified; /* from the candidates, proved to be the exact choice */
  int64_t fallbacks; /* from all logits, because the candidates did not decide */
  int64_t unproved;  /* without proof, by `exact` or without a certificate */
} headport_mode_counts;

/* Counts since a generator was opened. */
typedef struct headport_stats {
  size_t struct_size;
  int64_t new_tokens;
  int64_t certified, fallbacks, unproved; /* the sums over all modes */
  const headport_mode_counts* modes;      /* the generator's; valid until the next headport_get_stats */
  size_t mode_count;
  int64_t condition_runs; /* projections of conditions: one per name, one per use of values */
} headport_stats;

/* The past of a row, as callbacks see it. */
typedef struct headport_context {
  headport_ids prompt;
  headport_ids tokens; /* new tokens so far; their number is the step */
  headport_ids ends;   /* end tokens */
  size_t index;        /* place of the prompt in its request */
  size_t sample;       /* place among the replies to one prompt */
} headport_context;

/* One of the model's most likely tokens; natural logarithm. */
typedef struct headport_top_logprob {
  int64_t token_id;
  double logprob;
} headport_top_logprob;

/* How likely a token was; natural logarithms. */
typedef struct headport_likelihood {
  double logprob;           /* of the model's own distribution, before any rule */
  double processed_logprob; /* of the distribution that it was drawn from */
  const headport_top_logprob* top;
  size_t top_count;
} headport_likelihood;

/* One new token. */
typedef struct headport_token {
  size_t prompt; /* place of the prompt in its request */
  size_t sample; /* place among the replies to it */
  int64_t step;  /* 0 for the first new token */
  int64_t token_id;
  headport_finish finish;
  const headport_likelihood* likelihood; /* NULL where logprobs were not asked for */
  const char* text; /* what became definite with it; joined this is the reply's text. NULL where texts
                     * were not asked for */
  size_t text_size; /* bytes */
} headport_token;

/* The only ids that may follow. Leave `allowed` as it is to allow all; no ids at all are an error.
 * They must stay valid until the callback is asked again. Any status but HEADPORT_OK ends the call. */
typedef headport_status (*headport_allowed)(void* user, const headport_context* context,
                                            headport_ids* allowed);
/* The caller's own rule: changes scores [count] of ids [count] in place; -INFINITY bans. */
typedef headport_status (*headport_scores)(void* user, const headport_context* context,
                                           double* scores, const int64_t* ids, size_t count);
/* Called with each new token, in the calling thread. Anything but 0 ends the call as cancelled. */
typedef int32_t (*headport_on_token)(void* user, const headport_token* token);

/* How replies are made: runtime/SAMPLING.md says what each number does. */
typedef struct headport_options {
  size_t struct_size;
  int64_t max_new_tokens; /* per reply; 0 = as the bundle says, cut to the context */
  int64_t min_new_tokens; /* no end token before */
  int64_t min_length;     /* no end token before, the prompt's tokens included */
  double temperature;     /* 0 = greedy */
  int64_t top_k;          /* 0 = off */
  double top_p;           /* 1 = off */
  double min_p;           /* 0 = off */
  double typical_p;       /* 1 = off */
  double epsilon_cutoff;  /* 0 = off */
  double eta_cutoff;      /* 0 = off */
  double repetition_penalty; /* of prompt and reply; 1 = off */
  double presence_penalty;   /* of the reply; 0 = off */
  double frequency_penalty;  /* of the reply; 0 = off */
  int64_t no_repeat_ngram_size; /* of prompt and reply; 0 = off */
  const headport_bias* logit_bias;
  size_t logit_bias_count;
  const headport_ids* bad_words; /* sequences that are never completed */
  size_t bad_words_count;
  headport_ids suppress_tokens;       /* never chosen */
  headport_ids begin_suppress_tokens; /* never the first new token */
  headport_ids allowed_ids;           /* the only tokens that may follow; none given = all */
  headport_allowed allowed;           /* in place of the list: asked once per row and step */
  headport_scores process_scores;     /* after all other rules */
  void* rules_user;                   /* given to the two above */
  headport_ids eos_token_ids;         /* tokens that end a reply */
  const uint64_t* seeds; /* one for all prompts, or one per prompt; none = drawn */
  size_t seed_count;
  int64_t n;             /* replies per prompt */
  int64_t logprobs;      /* likelihood of each token and of this many most likely; -1 = none */
  headport_on_token on_token;
  void* on_token_user;
  headport_cancel* cancel;
  int64_t num_beams;      /* 1 = no beam search */
  double length_penalty;  /* of beams: the sum of ln p is divided by tokens to this power */
  int32_t early_stopping; /* of beams, a headport_early_stopping */
  int32_t texts;          /* 1: replies and tokens have their text; stop texts bring it along */
  const char* const* stop; /* texts that end a reply; they may begin and end inside tokens */
  size_t stop_count;
  const headport_condition* conditions; /* one for all prompts, or one per prompt; none = none */
  size_t condition_count;
} headport_options;

/* One reply. Its memory belongs to the replies it came from. */
typedef struct headport_reply {
  size_t struct_size;
  size_t prompt;
  size_t sample;
  headport_ids token_ids; /* new tokens only, a stopping end token included */
  headport_finish finish;
  int32_t has_seed; /* 0 where nothing was drawn and no seed was given */
  uint64_t seed;
  const headport_likelihood* likelihoods; /* one per token; NULL where not asked for */
  const char* text; /* the new text, without special tokens and stop text; NULL where not asked for */
  size_t text_size; /* bytes */
  int32_t has_score; /* 1 for a beam */
  double score;      /* sum of ln p / tokens ^ length_penalty */
} headport_reply;

HEADPORT_API const char* headport_version(void);
HEADPORT_API uint32_t headport_abi_version(void);
HEADPORT_API const char* headport_status_name(headport_status status);
/* Of the last call that failed in this thread; valid until the next one fails. */
HEADPORT_API const char* headport_last_error(void);

/* Fill with defaults. `struct_size` is the caller's sizeof. */
HEADPORT_API headport_status headport_settings_init(headport_settings* settings,
                                                    size_t struct_size);
/* NULL settings are the defaults. On success `*generator` is to be closed. */
HEADPORT_API headport_status headport_open(const char* bundle, const headport_settings* settings,
                                           headport_generator** generator);
/* No call on it may be running. NULL is allowed. */
HEADPORT_API void headport_close(headport_generator* generator);
HEADPORT_API headport_status headport_get_info(const headport_generator* generator,
                                               headport_info* info, size_t struct_size);
/* One call at a time; calls of generate may be running. */
HEADPORT_API headport_status headport_get_stats(headport_generator* generator,
                                                headport_stats* stats, size_t struct_size);

/* Token ids of a text, with the special tokens that the tokenizer itself adds: a prompt. `*ids` is to
 * be freed. Texts of tokenizers for which the ids are not known to be right are refused. */
HEADPORT_API headport_status headport_encode(const headport_generator* generator, const char* text,
                                             int64_t** ids, size_t* count);
/* Text of token ids, special tokens left out; ends with a null byte. `*text` is to be freed. */
HEADPORT_API headport_status headport_decode(const headport_generator* generator, headport_ids ids,
                                             char** text, size_t* size);
/* Frees what the two above gave. NULL is allowed. */
HEADPORT_API void headport_free(void* memory);

/* Fill with the bundle's own defaults; lists stay the generator's. */
HEADPORT_API headport_status headport_options_init(const headport_generator* generator,
                                                   headport_options* options, size_t struct_size);
/* Continue prompts. NULL options are the bundle's defaults. On success `*replies` is to be freed.
 * Calls on one generator from several threads run one after the other. */
HEADPORT_API headport_status headport_generate(headport_generator* generator,
                                               const headport_ids* prompts, size_t prompt_count,
                                               const headport_options* options,
                                               headport_replies** replies);
HEADPORT_API size_t headport_replies_count(const headport_replies* replies);
/* The replies to the first prompt, then those to the second, and so on. */
HEADPORT_API headport_status headport_replies_get(const headport_replies* replies, size_t index,
                                                  headport_reply* reply, size_t struct_size);
HEADPORT_API void headport_replies_free(headport_replies* replies);

HEADPORT_API headport_status headport_cancel_new(headport_cancel** cancel);
/* From any thread, or from a signal handler. Holds for all calls that are given it. */
HEADPORT_API void headport_cancel_request(headport_cancel* cancel);
HEADPORT_API void headport_cancel_free(headport_cancel* cancel);

#ifdef __cplusplus
}
#endif

#endif /* HEADPORT_HEADPORT_H */
