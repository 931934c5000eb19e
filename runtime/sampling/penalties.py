"""Rules that add to scores or scale them; none bans a token. See `processors.PROCESSORS`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headport.runtime.sampling.columns import columns_of, ends_with, past_of
from headport.runtime.sampling.settings import Context, Sampling

__all__ = ["bias_of", "bias_scores", "penalise_presence", "penalise_repetition"]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


def bias_of(sampling: Sampling, context: Context) -> dict[int, float]:
    """Id → what all sequences that it would complete add to it; a sequence given twice counts once.

    The later of two equal sequences holds.
    """
    past, bias = past_of(context), dict[int, float]()
    for words, value in dict(sampling.logit_bias).items():
        if ends_with(past, words[:-1]):
            bias[words[-1]] = bias.get(words[-1], 0.0) + value
    return bias


def bias_scores(scores: Float64, ids: Int64, sampling: Sampling, context: Context) -> Float64:
    """Add to the last id of each sequence whose other ids are the latest tokens."""
    found = scores.copy()
    for token_id, value in bias_of(sampling, context).items():
        found[columns_of(ids, (token_id,))] += value
    return found


def penalise_repetition(
    scores: Float64, ids: Int64, sampling: Sampling, context: Context
) -> Float64:
    """Ids of prompt and reply, each once: score · p below zero, score / p else.

    Source: Keskar et al. 2019, arXiv:1909.05858, with the sign rule of transformers.
    """
    found = scores.copy()
    columns = columns_of(ids, past_of(context))
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
