"""Rules that ban tokens, whatever their scores. See `processors.PROCESSORS`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from headport.runtime.sampling.columns import columns_of, ends_with, past_of
from headport.runtime.sampling.settings import Context, Sampling

__all__ = [
    "ban_at_begin",
    "ban_bad_words",
    "ban_early_ends",
    "ban_repeated_ngrams",
    "ban_suppressed",
]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


def _ban(scores: Float64, ids: Int64, banned: Iterable[int]) -> Float64:
    found = scores.copy()
    found[columns_of(ids, banned)] = -np.inf
    return found


def ban_repeated_ngrams(
    scores: Float64, ids: Int64, sampling: Sampling, context: Context
) -> Float64:
    """Ban each id that would complete an n-gram which stands in prompt and reply already."""
    size, past = sampling.no_repeat_ngram_size, np.array(past_of(context), np.int64)
    if len(past) < size:
        return scores
    windows = np.lib.stride_tricks.sliding_window_view(past, size)
    same = (windows[:, :-1] == past[len(past) + 1 - size :]).all(axis=1)
    return _ban(scores, ids, windows[same, -1])


def ban_bad_words(scores: Float64, ids: Int64, sampling: Sampling, context: Context) -> Float64:
    """Ban the last id of each sequence whose other ids are the latest tokens.

    A sequence that is an end token alone is left out.
    """
    past, ends = past_of(context), {(token_id,) for token_id in context.eos_token_ids}
    words = (w for w in sampling.bad_words if w not in ends and ends_with(past, w[:-1]))
    return _ban(scores, ids, [w[-1] for w in words])


def ban_early_ends(scores: Float64, ids: Int64, sampling: Sampling, context: Context) -> Float64:
    """No end token below `min_length` tokens in all, nor below `min_new_tokens` new ones."""
    new = len(context.token_ids)
    early = new < sampling.min_new_tokens
    early |= context.prompt_length + new < sampling.min_length
    return _ban(scores, ids, context.eos_token_ids) if early else scores


def ban_suppressed(scores: Float64, ids: Int64, sampling: Sampling, _: Context) -> Float64:
    """Ban ids at every step."""
    return _ban(scores, ids, sampling.suppress_tokens)


def ban_at_begin(scores: Float64, ids: Int64, sampling: Sampling, context: Context) -> Float64:
    """Ban ids as the first new token that is not forced."""
    forced = sampling.forced_bos is not None and context.prompt_length == 1
    first = len(context.token_ids) == int(forced)
    return _ban(scores, ids, sampling.begin_suppress_tokens) if first else scores
