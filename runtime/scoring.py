"""Logits and scores of given tokens: no sampling, no defaults, each token once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headport.runner import Runner
from headport.runtime.results import Score
from headport.runtime.vocabulary import IdMap

__all__ = ["logits_of", "score_of"]

Float32 = npt.NDArray[np.float32]

_ROWS = 256  # head rows at a time: bounds the memory that a long text with a large V needs


def logits_of(token_ids: Sequence[int], runner: Runner, head: str, ids: IdMap) -> Float32:
    """Raw logits after each token, by original id, -inf where an id was pruned.

    [T] → float32 [T, V].
    """
    hidden = _hidden(token_ids, runner)
    found = np.empty((len(token_ids), ids.size), np.float32)
    for start in range(0, len(hidden), _ROWS):
        rows = _head_rows(hidden[start : start + _ROWS], runner, head, ids)
        found[start : start + _ROWS] = ids.spread(rows)
    return found


def score_of(token_ids: Sequence[int], runner: Runner, head: str, ids: IdMap) -> Score:
    """Negative log-likelihood of each token given those before it, in float64.

    nll[t] = ln Σ_v exp z[t-1, v] - z[t-1, token_ids[t]]. The first token has nothing before it
    and is not scored. A pruned id scores infinity.
    """
    nll = np.zeros(len(token_ids), np.float64)
    mask = np.arange(len(token_ids)) > 0
    hidden = _hidden(token_ids, runner)[:-1]
    targets = np.array(token_ids[1:], np.int64)
    for start in range(0, len(hidden), _ROWS):
        rows = _head_rows(hidden[start : start + _ROWS], runner, head, ids).astype(np.float64)
        largest = rows.max(axis=1, keepdims=True)
        logsumexp = np.log(np.exp(rows - largest).sum(axis=1)) + largest[:, 0]
        wanted = targets[start : start + _ROWS]
        columns = np.minimum(np.searchsorted(ids.ids, wanted), len(ids.ids) - 1)
        found = rows[np.arange(len(rows)), columns]
        known = ids.ids[columns] == wanted
        nll[start + 1 : start + 1 + len(rows)] = np.where(known, logsumexp - found, np.inf)
    return Score(list(token_ids), nll, mask)


def _hidden(token_ids: Sequence[int], runner: Runner) -> Float32:
    row = np.array([token_ids], np.int64)
    cache = runner.new_cache(1, len(token_ids))
    hidden: Float32 = runner.forward(cache, row, np.array([len(token_ids)], np.int64))[0]
    return hidden


def _head_rows(hidden: Float32, runner: Runner, head: str, ids: IdMap) -> Float32:
    return ids.rows(runner.full_logits(hidden, head))
