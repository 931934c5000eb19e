"""Faults of a sampler, planted in the draw; the report names the row of the grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from headport.runtime.sampling.filters import keep
from headport.runtime.sampling.noise import NoiseKey
from headport.runtime.sampling.sampler import choose
from headport.runtime.sampling.settings import Sampling
from tests.validate.planted.row import Row

__all__ = ["PROCESSORS", "ROWS", "last_tie"]


def _order(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    """top-p before top-k."""
    first = keep(logits, Sampling(s.temperature, 0, s.top_p, 0.0))
    kept = first[keep(logits[first], Sampling(s.temperature, s.top_k, 1.0, s.min_p))]
    return choose(logits[kept], ids[kept], Sampling(s.temperature), key)


def _temperature_twice(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    return choose(logits, ids, Sampling(s.temperature**2, s.top_k, s.top_p, s.min_p), key)


def _temperature_behind(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    """The filters look at logits that the temperature has not divided yet."""
    if not s.temperature:
        return choose(logits, ids, s, key)
    kept = keep(logits, Sampling(1.0, s.top_k, s.top_p, s.min_p))
    return choose(logits[kept], ids[kept], Sampling(s.temperature), key)


def _one_more(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    return choose(
        logits, ids, Sampling(s.temperature, s.top_k and s.top_k + 1, s.top_p, s.min_p), key
    )


def _seedless(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    return choose(logits, ids, s, NoiseKey(0, key.step, key.sample))


def _stepless(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    return choose(logits, ids, s, NoiseKey(key.seed, 0, key.sample))


def _shifted_noise(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    return choose(logits, ids + 1, s, key) - 1


def _no_filter(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    return choose(logits, ids, Sampling(s.temperature), key)


def _no_min_p(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    return choose(logits, ids, Sampling(s.temperature, s.top_k, s.top_p), key)


def last_tie(logits: Any, ids: Any, s: Sampling, key: NoiseKey) -> int:
    """Of equal logits the last one wins; needs logits with a tie to be seen."""
    if s.temperature == 0:
        return int(np.flatnonzero(logits == logits.max())[-1])
    return choose(logits, ids, s, key)


def _row(fault: str, plant: Any, part: str) -> Row:
    return Row(fault, "sampler", plant, frozenset({"sampler"}), part)


# `part` is a piece of the row's parameters
ROWS = (
    _row("filters in another order", _order, "top_k 40, top_p"),
    _row("temperature applied twice", _temperature_twice, "temperature"),
    _row("temperature behind the filters", _temperature_behind, "top_p"),
    _row("top-k off by one", _one_more, "top_k 1"),
    _row("seed not heeded", _seedless, "temperature"),
    _row("step not heeded", _stepless, "temperature"),
    _row("noise of the next id", _shifted_noise, "temperature"),
    _row("filters not heeded", _no_filter, "top_"),
    _row("min-p dropped", _no_min_p, "min_p"),
    _row("tie to the highest id", last_tie, "greedy"),
)


def _drop(**neutral: Any) -> Any:
    """The sampler is asked for something and does as if it were not."""
    return lambda asked: replace(asked, **neutral)


def _double(asked: Sampling) -> Sampling:
    return replace(asked, repetition_penalty=asked.repetition_penalty**2)


def _exchange(asked: Sampling) -> Sampling:
    return replace(
        asked,
        presence_penalty=asked.frequency_penalty,
        frequency_penalty=asked.presence_penalty,
    )


# Faults of what changes scores before the filters; `plant` maps the settings asked for to those
# that are heeded.
PROCESSORS = (
    _row("repetition penalty dropped", _drop(repetition_penalty=1.0), "repetition_penalty"),
    _row("repetition penalty applied twice", _double, "repetition_penalty"),
    _row("presence and frequency exchanged", _exchange, "presence_penalty"),
    _row("bias dropped", _drop(logit_bias=()), "logit_bias"),
    _row("repeated n-grams let through", _drop(no_repeat_ngram_size=0), "no_repeat_ngram_size"),
    _row("bad words let through", _drop(bad_words=()), "bad_words"),
    _row("end of text before its time", _drop(min_new_tokens=0), "min_new_tokens"),
    _row("allowed tokens not heeded", _drop(allowed=None), "allowed"),
    _row("suppressed tokens let through", _drop(suppress_tokens=()), "suppress_tokens"),
)
