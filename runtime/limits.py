"""The ranges of all options, in one table that calls and bundles are held against."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from headport.errors import RequestError
from headport.runtime.sampling.noise import MAX_SEED

__all__ = ["LIMITS", "MAX_BEAMS", "MAX_LOGPROBS", "MAX_REPLIES", "check", "is_whole"]

MAX_LOGPROBS = 1000  # a reply carries them for every token
MAX_REPLIES = 10_000  # to one prompt; each is a row from the start
_MOST_PENALTY = 50  # a million tokens to this power is still a number
MAX_BEAMS = 1000  # a step of a search works on all of them, and nothing interrupts a step

_MOST_SHOWN = 200  # characters of a value in a message

Check = Callable[[Any], bool]
_LEAST = 5e-324  # the smallest number above 0
_BELOW_1 = 1.0 - 2.0**-53
_BOOLEANS: tuple[type, ...] = (bool,)  # Python's own counts as a number


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; truth values are none, NumPy's integers are."""
    return isinstance(value, numbers.Integral) and not isinstance(value, _BOOLEANS)


def _whole(low: int, high: float = float("inf")) -> Check:
    return lambda v: is_whole(v) and low <= int(v) <= high


def _real(low: float, high: float) -> Check:
    def holds(value: Any) -> bool:
        if not isinstance(value, numbers.Real) or isinstance(value, _BOOLEANS):
            return False
        try:
            return low <= float(value) <= high  # NaN fails every comparison: it is refused as well
        except OverflowError:  # a whole number beyond every float
            return False

    return holds


def _text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _one_or_several(check: Check) -> Check:
    def holds(value: Any) -> bool:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return all(check(v) for v in value)
        return check(value)

    return holds


_LISTS = (list, tuple, np.ndarray)
_ID = _whole(0)


def _several(check: Check) -> Check:
    return lambda value: isinstance(value, _LISTS) and all(check(v) for v in value)


def _bias(value: Any) -> bool:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, _LISTS) or not all(
        isinstance(pair, _LISTS) and len(pair) == 2 for pair in pairs
    ):
        return False
    return all((_ID(words) or _words(words)) and _real(-1e30, 1e30)(bias) for words, bias in pairs)


def _words(value: Any) -> bool:
    return isinstance(value, _LISTS) and len(value) > 0 and all(_ID(v) for v in value)


def _early_stopping(value: Any) -> bool:
    return isinstance(value, _BOOLEANS) or (isinstance(value, str) and value == "never")


_IDS = "a list of token ids, whole numbers from 0 up"

# option → (check, what is expected); `parameters.Options` says what each one does
LIMITS: dict[str, tuple[Check, str]] = {
    "max_new_tokens": (_whole(1), "a whole number from 1 up"),
    "max_length": (_whole(1), "a whole number from 1 up"),
    "min_length": (_whole(0), "a whole number from 0 (off) up"),
    "min_new_tokens": (_whole(0), "a whole number from 0 (off) up"),
    "temperature": (_real(0.0, 1e30), "a number from 0 (greedy) to 1e30"),
    "top_k": (_whole(0), "a whole number from 0 (off) up"),
    "top_p": (_real(0.0, 1.0), "a number from 0 to 1 (off)"),
    "min_p": (_real(0.0, 1.0), "a number from 0 (off) to 1"),
    "typical_p": (_real(_LEAST, 1.0), "a number above 0, to 1 (off)"),
    "epsilon_cutoff": (_real(0.0, _BELOW_1), "a number from 0 (off), below 1"),
    "eta_cutoff": (_real(0.0, _BELOW_1), "a number from 0 (off), below 1"),
    "repetition_penalty": (_real(1e-30, 1e30), "a number from 1e-30 to 1e30; 1 is off"),
    "presence_penalty": (_real(-1e30, 1e30), "a finite number; 0 is off"),
    "frequency_penalty": (_real(-1e30, 1e30), "a finite number; 0 is off"),
    "no_repeat_ngram_size": (_whole(0), "a whole number from 0 (off) up"),
    "logit_bias": (_bias, "a mapping of token ids, or tuples of them, to finite numbers"),
    "bad_words": (_several(_words), "a list of token sequences that are not empty"),
    "suppress_tokens": (_several(_ID), _IDS),
    "begin_suppress_tokens": (_several(_ID), _IDS),
    "forced_bos": (_whole(0), "a token id, a whole number from 0 up"),
    "forced_eos": (_one_or_several(_whole(0)), "token ids, whole numbers from 0 up"),
    "allowed": (lambda v: callable(v) or _words(v), f"a function, or {_IDS}, not empty"),
    "process_scores": (callable, "a function (context, scores, ids) → scores"),
    "rerank": (callable, "a function (replies of a prompt) → replies"),
    "n": (_whole(1, MAX_REPLIES), f"a whole number from 1 to {MAX_REPLIES}"),
    "num_beams": (
        _whole(1, MAX_BEAMS),
        f"a whole number from 1 (no beam search) to {MAX_BEAMS}",
    ),
    "length_penalty": (
        _real(-_MOST_PENALTY, _MOST_PENALTY),
        f"a number from -{_MOST_PENALTY} to {_MOST_PENALTY}",
    ),
    "early_stopping": (_early_stopping, 'True, False or "never"'),
    "logprobs": (_whole(0, MAX_LOGPROBS), f"a whole number from 0 to {MAX_LOGPROBS}"),
    "seed": (_one_or_several(_whole(0, MAX_SEED)), f"whole numbers from 0 to {MAX_SEED}"),
    "stop": (_one_or_several(_text), "texts that are not empty"),
    "eos_token_id": (_one_or_several(_whole(0)), "token ids, whole numbers from 0 up"),
}


def _short(value: Any) -> str:
    found = repr(value)
    return found if len(found) <= _MOST_SHOWN else f"{found[:_MOST_SHOWN]}…"


def check(values: Mapping[str, Any]) -> None:
    """Hold values against the table.

    Raises:
        RequestError: Naming every option that is out of range, its range and its value.
    """
    faults = [
        f"{name} must be {LIMITS[name][1]}, {_short(value)} was given"
        for name, value in values.items()
        if not LIMITS[name][0](value)
    ]
    if faults:
        raise RequestError("; ".join(faults))
