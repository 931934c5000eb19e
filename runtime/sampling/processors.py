"""What changes scores before a token is chosen: one row of a table per rule, in order.

Order and meaning are those of transformers 5.24 (`generation/utils.py`, `_get_logits_processor`);
presence and frequency penalties, which it lacks, stand behind the repetition penalty, as in vLLM.
Each rule is a pure function of one row: scores [K] float64, the original ids of its columns [K],
ascending, and the row's past. -inf bans a token. All but `allowed` and `process_scores` look at
each column alone, so they hold for any part of a row as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from headport.errors import RequestError
from headport.runtime.sampling.allowed import allowed_columns, keep_allowed
from headport.runtime.sampling.bans import (
    ban_at_begin,
    ban_bad_words,
    ban_early_ends,
    ban_repeated_ngrams,
    ban_suppressed,
)
from headport.runtime.sampling.callbacks import ask_callback
from headport.runtime.sampling.columns import past_of
from headport.runtime.sampling.forced import force_ids, forced_ids
from headport.runtime.sampling.penalties import (
    bias_of,
    bias_scores,
    penalise_presence,
    penalise_repetition,
)
from headport.runtime.sampling.settings import Context, Sampling

__all__ = ["PROCESSORS", "Processor", "apply_processors", "overruled"]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


def ask_caller(scores: Float64, ids: Int64, sampling: Sampling, context: Context) -> Float64:
    """The caller's own rule, on a copy.

    Raises:
        RequestError: If it fails, or gives anything but scores of the same shape without NaN and
            +inf.
    """
    process = sampling.process_scores
    assert process is not None
    where = f"process_scores, prompt {context.index}, step {len(context.token_ids)}"
    found = ask_callback(
        where, lambda: np.asarray(process(context, scores.copy(), ids), np.float64)
    )
    if found.shape != scores.shape or np.isnan(found).any() or np.isposinf(found).any():
        raise RequestError(
            f"{where}: scores {list(scores.shape)} without NaN and +inf were expected, "
            f"{list(found.shape)} with {int((~np.isfinite(found)).sum())} not finite were given"
        )
    return found


Apply = Callable[[Float64, Int64, Sampling, Context], Float64]
Raised = Callable[[Sampling, Context], Iterable[int]]


def _lifts_nothing(_: Sampling, __: Context) -> Iterable[int]:
    return ()


@dataclass(frozen=True)
class Processor:
    """One rule: when it acts, what it does, and which ids it may lift above the score they had."""

    name: str
    acts: Callable[[Sampling], bool]
    apply: Apply
    lifts: Raised = _lifts_nothing


PROCESSORS: tuple[Processor, ...] = (
    Processor(
        "logit_bias",
        lambda s: bool(s.logit_bias),
        bias_scores,
        lambda s, c: (i for i, value in bias_of(s, c).items() if value > 0),
    ),
    Processor(
        "repetition_penalty",
        lambda s: s.repetition_penalty != 1.0,
        penalise_repetition,
        lambda s, c: past_of(c) if s.repetition_penalty < 1.0 else (),
    ),
    Processor(
        "presence_and_frequency_penalty",
        lambda s: s.presence_penalty != 0.0 or s.frequency_penalty != 0.0,
        penalise_presence,
        lambda s, c: c.token_ids if min(s.presence_penalty, s.frequency_penalty) < 0 else (),
    ),
    Processor("no_repeat_ngram_size", lambda s: s.no_repeat_ngram_size > 0, ban_repeated_ngrams),
    Processor("bad_words", lambda s: bool(s.bad_words), ban_bad_words),
    Processor(
        "min_length, min_new_tokens",
        lambda s: s.min_length > 0 or s.min_new_tokens > 0,
        ban_early_ends,
    ),
    Processor("allowed", lambda s: s.allowed is not None, keep_allowed),
    Processor(
        "forced_bos, forced_eos",
        lambda s: s.forced_bos is not None or bool(s.forced_eos),
        force_ids,
        forced_ids,
    ),
    Processor("suppress_tokens", lambda s: bool(s.suppress_tokens), ban_suppressed),
    Processor("begin_suppress_tokens", lambda s: bool(s.begin_suppress_tokens), ban_at_begin),
    Processor("process_scores", lambda s: s.process_scores is not None, ask_caller),
)


def overruled(ids: Int64, sampling: Sampling, context: Context) -> bool:
    """Whether all that `allowed` leaves is banned by the rules before it, which then do not hold.

    Bans do not depend on scores, so none are needed.
    """
    if sampling.allowed is None:
        return False
    scores = np.zeros(len(ids))
    for processor in takewhile(lambda each: each.name != "allowed", PROCESSORS):
        if processor.acts(sampling):
            scores = processor.apply(scores, ids, sampling, context)
    return not (scores[allowed_columns(ids, sampling, context)] > -np.inf).any()


def apply_processors(scores: Float64, ids: Int64, sampling: Sampling, context: Context) -> Float64:
    """All rules that act, in order. [K] → [K]; the input is left as it is."""
    for processor in PROCESSORS:
        if processor.acts(sampling):
            scores = processor.apply(scores, ids, sampling, context)
    return scores
