"""What changes scores before a token is chosen: one row of a table per rule, in order.

Order and meaning are those of transformers 5.24 (`generation/utils.py`, `_get_logits_processor`);
presence and frequency penalties, which it lacks, stand behind the repetition penalty, as in vLLM.
Each rule is a pure function of one row: scores [K] float64, the original ids of its columns [K],
ascending, and the row's past. -inf bans a token. All but `allowed` and `process_scores` look at
each column alone, so they hold for any part of a row as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from headport.errors import HeadportError, RequestError
from headport.runtime.sampling.settings import Context, Sampling

__all__ = [
    "PROCESSORS",
    "Processor",
    "allowed_columns",
    "apply_processors",
    "columns_of",
    "overruled",
]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def columns_of(ids: Int64, wanted: Iterable[int]) -> Int64:
    """Columns of those wanted ids that exist, each once, ascending."""
    sought = np.unique(np.fromiter(wanted, np.int64))
    places = np.minimum(np.searchsorted(ids, sought), len(ids) - 1)
    found: Int64 = places[ids[places] == sought]
    return found


def _ban(scores: Float64, ids: Int64, banned: Iterable[int]) -> Float64:
    found = scores.copy()
    found[columns_of(ids, banned)] = -np.inf
    return found


def _ends_with(past: Sequence[int], words: Sequence[int]) -> bool:
    return len(past) >= len(words) and list(past[len(past) - len(words) :]) == list(words)


def _past(context: Context) -> list[int]:
    return [*context.prompt_token_ids, *context.token_ids]


def _bias_of(sampling: Sampling, context: Context) -> dict[int, float]:
    """Id → what all sequences that it would complete add to it; a sequence given twice counts once.

    The later of two equal sequences holds.
    """
    past, bias = _past(context), dict[int, float]()
    for words, value in dict(sampling.logit_bias).items():
        if _ends_with(past, words[:-1]):
            bias[words[-1]] = bias.get(words[-1], 0.0) + value
    return bias


def bias_scores(scores: Float64, ids: Int64, sampling: Sampling, context: Context) -> Float64:
    """Add to the last id of each sequence whose other ids are the latest tokens."""
    found = scores.copy()
    for token_id, value in _bias_of(sampling, context).items():
        found[columns_of(ids, (token_id,))] += value
    return found


def penalise_repetition(
    scores: Float64, ids: Int64, sampling: Sampling, context: Context
) -> Float64:
    """Ids of prompt and reply, each once: score · p below zero, score / p else.

    Source: Keskar et al. 2019, arXiv:1909.05858, with the sign rule of transformers.
    """
    found = scores.copy()
    columns = columns_of(ids, _past(context))
    old, p = found[columns], sampling.repetition_penalty
    found[columns] = np.where(old < 0, old * p, old / p)
    return found


def penalise_presence(scores: Float64, ids: Int64, sampling: Sampling, context: Context) -> Float64:
    """Ids of the reply alone, c times in it: score - (c · frequency + presence).

    Source: the OpenAI API reference, "Frequency and presence penalties"; only new tokens count.
    """
    found = scores.copy()
    seen, counts = np.unique(np.array(context.token_ids, np.int64), return_counts=True)
    columns = columns_of(ids, seen)
    counts = counts[np.isin(seen, ids[columns])]
    found[columns] -= counts * sampling.frequency_penalty + sampling.presence_penalty
    return found


def ban_repeated_ngrams(
    scores: Float64, ids: Int64, sampling: Sampling, context: Context
) -> Float64:
    """Ban each id that would complete an n-gram which stands in prompt and reply already."""
    size, past = sampling.no_repeat_ngram_size, np.array(_past(context), np.int64)
    if len(past) < size:
        return scores
    windows = np.lib.stride_tricks.sliding_window_view(past, size)
    same = (windows[:, :-1] == past[len(past) + 1 - size :]).all(axis=1)
    return _ban(scores, ids, windows[same, -1])


def ban_bad_words(scores: Float64, ids: Int64, sampling: Sampling, context: Context) -> Float64:
    """Ban the last id of each sequence whose other ids are the latest tokens.

    A sequence that is an end token alone is left out.
    """
    past, ends = _past(context), {(token_id,) for token_id in context.eos_token_ids}
    words = (w for w in sampling.bad_words if w not in ends and _ends_with(past, w[:-1]))
    return _ban(scores, ids, [w[-1] for w in words])


def ban_early_ends(scores: Float64, ids: Int64, sampling: Sampling, context: Context) -> Float64:
    """No end token below `min_length` tokens in all, nor below `min_new_tokens` new ones."""
    new = len(context.token_ids)
    early = new < sampling.min_new_tokens
    early |= len(context.prompt_token_ids) + new < sampling.min_length
    return _ban(scores, ids, context.eos_token_ids) if early else scores


def allowed_columns(ids: Int64, sampling: Sampling, context: Context) -> Mask:
    """Which columns `allowed` leaves; ids that do not exist are left out.

    Raises:
        RequestError: If a mask is not of the vocabulary's size.
    """
    assert sampling.allowed is not None
    found = np.asarray(sampling.allowed(context))
    if found.dtype == np.bool_:
        if found.ndim != 1 or len(found) <= ids[-1]:
            raise RequestError(
                f"allowed: a mask over the vocabulary, bool [{int(ids[-1]) + 1}] or longer, was "
                f"expected, bool {list(found.shape)} was given"
            )
        mask: Mask = found[ids]
        return mask
    mask = np.zeros(len(ids), np.bool_)
    mask[columns_of(ids, found.astype(np.int64).ravel())] = True
    return mask


def keep_allowed(scores: Float64, ids: Int64, sampling: Sampling, context: Context) -> Float64:
    """Ban all that is not allowed. Where all that is allowed was banned before, that score is 0."""
    allowed = allowed_columns(ids, sampling, context)
    if not np.isfinite(scores[allowed]).any():
        return np.where(allowed, 0.0, -np.inf)
    return np.where(allowed, scores, -np.inf)


def ban_suppressed(scores: Float64, ids: Int64, sampling: Sampling, _: Context) -> Float64:
    """Ban ids at every step."""
    return _ban(scores, ids, sampling.suppress_tokens)


def ban_at_begin(scores: Float64, ids: Int64, sampling: Sampling, context: Context) -> Float64:
    """Ban ids as the first new token."""
    return _ban(scores, ids, sampling.begin_suppress_tokens) if not context.token_ids else scores


def ask_caller(scores: Float64, ids: Int64, sampling: Sampling, context: Context) -> Float64:
    """The caller's own rule, on a copy.

    Raises:
        RequestError: If it fails, or gives anything but scores of the same shape without NaN and
            +inf.
    """
    assert sampling.process_scores is not None
    where = f"process_scores, prompt {context.index}, step {len(context.token_ids)}"
    try:
        found = np.asarray(sampling.process_scores(context, scores.copy(), ids), np.float64)
    except HeadportError:
        raise
    except Exception as error:  # the caller's code may raise anything
        raise RequestError(f"{where} failed: {type(error).__name__}: {error}") from error
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
        lambda s, c: (i for i, value in _bias_of(s, c).items() if value > 0),
    ),
    Processor(
        "repetition_penalty",
        lambda s: s.repetition_penalty != 1.0,
        penalise_repetition,
        lambda s, c: _past(c) if s.repetition_penalty < 1.0 else (),
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
