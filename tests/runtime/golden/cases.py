"""Which rules and filters the golden vectors cover: name, options, past."""

from __future__ import annotations

from typing import Any

__all__ = ["EOS", "FILTERS", "FORCED", "PAST", "RULES", "SIZE"]

SIZE = 29  # prime
EOS = [3, 17]

PAST = {"prompt": [4, 9, 4, 11], "tokens": [9, 9, 2, 4, 9]}
NONE = {"prompt": [4, 9, 4, 11], "tokens": []}

RULES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("nothing", {}, PAST),
    ("bias", {"logit_bias": [[[5], 4.5], [[9], -3.25]]}, PAST),
    ("bias of a sequence", {"logit_bias": [[[4, 9, 7], 6.0], [[9, 4, 7], 9.0], [[7], 1.0]]}, PAST),
    (
        "bias longer than the past",
        {"logit_bias": [[[1, 2, 3, 4, 5, 6, 7, 8, 9, 4, 9, 5], 50.0]]},
        PAST,
    ),
    ("bias given twice", {"logit_bias": [[[5], 4.5], [[5], -2.0]]}, PAST),
    ("repetition", {"repetition_penalty": 1.3}, PAST),
    ("repetition of the prompt alone", {"repetition_penalty": 1.3}, NONE),
    ("repetition rewarded", {"repetition_penalty": 0.7}, PAST),
    ("presence", {"presence_penalty": 1.5}, PAST),
    ("presence of the prompt does not count", {"presence_penalty": 1.5}, NONE),
    ("frequency", {"frequency_penalty": 0.75}, PAST),
    (
        "presence and frequency, rewarded",
        {"presence_penalty": -1.0, "frequency_penalty": -0.5},
        PAST,
    ),
    (
        "all penalties",
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        PAST,
    ),
    ("1-grams", {"no_repeat_ngram_size": 1}, PAST),
    ("2-grams", {"no_repeat_ngram_size": 2}, PAST),
    ("3-grams", {"no_repeat_ngram_size": 3}, PAST),
    ("n-grams longer than the past", {"no_repeat_ngram_size": 12}, PAST),
    ("bad words", {"bad_words": [[5], [9, 6], [4, 9, 8], [2, 9, 1]]}, PAST),
    ("a bad word that is an end token", {"bad_words": [[3], [9, 17]]}, PAST),
    ("least length, not reached", {"min_length": 10}, PAST),
    ("least length, reached", {"min_length": 9}, PAST),
    ("least new tokens, not reached", {"min_new_tokens": 6}, PAST),
    ("least new tokens, reached", {"min_new_tokens": 5}, PAST),
    ("allowed", {"allowed": [2, 8, 21]}, PAST),
    ("allowed and banned before", {"allowed": [5, 8], "bad_words": [[5], [8]]}, PAST),
    ("allowed and suppressed after", {"allowed": [5, 8], "suppress_tokens": [8]}, PAST),
    ("allowed and all suppressed after", {"allowed": [5, 8], "suppress_tokens": [5, 8]}, PAST),
    ("suppress", {"suppress_tokens": [0, 9, 28]}, PAST),
    ("suppress at the beginning", {"begin_suppress_tokens": [1, 9]}, NONE),
    ("suppress at the beginning, later", {"begin_suppress_tokens": [1, 9]}, PAST),
    (
        "bias, then penalties",
        {
            "logit_bias": [[[9], 5.0], [[4], -5.0]],
            "repetition_penalty": 1.5,
            "frequency_penalty": 0.5,
        },
        PAST,
    ),
    (
        "everything",
        {
            "logit_bias": [[[9], 2.0]],
            "repetition_penalty": 1.1,
            "presence_penalty": 0.3,
            "no_repeat_ngram_size": 2,
            "bad_words": [[22]],
            "min_new_tokens": 9,
            "suppress_tokens": [25],
            "allowed": [1, 2, 3, 4, 5, 9, 11, 20, 22, 25, 27],
        },
        PAST,
    ),
)

FILTERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("temperature below 1", {"temperature": 0.3}),
    ("temperature 1", {"temperature": 1.0}),
    ("temperature above 1", {"temperature": 1.7}),
    ("top-k 1", {"temperature": 1.0, "top_k": 1}),
    ("top-k", {"temperature": 1.0, "top_k": 5}),
    ("top-k above V", {"temperature": 1.0, "top_k": 50}),
    ("top-p 0", {"temperature": 1.0, "top_p": 0.0}),
    ("top-p tiny", {"temperature": 1.0, "top_p": 1e-8}),
    ("top-p", {"temperature": 0.8, "top_p": 0.7}),
    ("top-p wide", {"temperature": 1.2, "top_p": 0.99}),
    ("min-p", {"temperature": 1.0, "min_p": 0.1}),
    ("min-p 1", {"temperature": 1.0, "min_p": 1.0}),
    ("typical-p", {"temperature": 1.0, "typical_p": 0.5}),
    ("typical-p small", {"temperature": 1.5, "typical_p": 0.01}),
    ("typical-p wide", {"temperature": 0.7, "typical_p": 0.95}),
    ("epsilon", {"temperature": 1.0, "epsilon_cutoff": 0.03}),
    ("epsilon above all", {"temperature": 2.0, "epsilon_cutoff": 0.9}),
    ("eta", {"temperature": 1.0, "eta_cutoff": 0.05}),
    ("eta, flat", {"temperature": 3.0, "eta_cutoff": 0.3}),
    ("top-p, min-p", {"temperature": 1.0, "top_p": 0.6, "min_p": 0.4}),
    ("min-p, typical-p", {"temperature": 1.0, "min_p": 0.3, "typical_p": 0.3}),
    ("typical-p, epsilon", {"temperature": 1.0, "typical_p": 0.5, "epsilon_cutoff": 0.15}),
    ("epsilon, eta", {"temperature": 1.0, "epsilon_cutoff": 0.1, "eta_cutoff": 0.4}),
    ("top-k, top-p", {"temperature": 1.0, "top_k": 2, "top_p": 0.5}),
    ("top-k, top-p, min-p", {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05}),
    (
        "all filters",
        {
            "temperature": 1.4,
            "top_k": 20,
            "top_p": 0.95,
            "min_p": 0.01,
            "typical_p": 0.9,
            "epsilon_cutoff": 0.01,
            "eta_cutoff": 0.02,
        },
    ),
    (
        "penalty, then filters",
        {"temperature": 0.9, "repetition_penalty": 1.4, "top_k": 6, "top_p": 0.8},
    ),
    (
        "mask, then filters",
        {"temperature": 1.0, "allowed": [1, 2, 8, 9], "top_k": 9, "typical_p": 0.6},
    ),
)

# Of a reply that has `limit` new tokens at the most.
BEGIN = {"prompt": [4], "tokens": [], "limit": 6}
SECOND = {"prompt": [4], "tokens": [9], "limit": 6}
LAST = PAST | {"limit": 6}
BOTH = {"forced_bos": 12, "forced_eos": [3]}

FORCED: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("forced at the beginning", BOTH, BEGIN),
    ("a prompt of more than one token is no beginning", BOTH, NONE | {"limit": 6}),
    ("nothing forced in between", BOTH, SECOND),
    ("forced at the end", BOTH, LAST),
    ("the end comes first", BOTH, BEGIN | {"limit": 1}),
    ("several forced at the end", {"forced_eos": [3, 17, 20]}, LAST),
    ("forced and banned before", {"forced_eos": [3], "min_new_tokens": 9}, LAST),
    ("forced and not allowed", {"forced_eos": [3], "allowed": [5, 8]}, LAST),
    ("forced and suppressed after", {"forced_eos": [3, 17], "suppress_tokens": [3]}, LAST),
    ("suppressed where nothing is forced", BOTH | {"begin_suppress_tokens": [1, 9, 12]}, BEGIN),
    ("suppressed behind what is forced", BOTH | {"begin_suppress_tokens": [1, 9]}, SECOND),
    ("forced, then drawn", BOTH | {"temperature": 1.0, "top_k": 4}, LAST),
)
