"""Choosing from a head that gives its best candidates instead of all logits.

The first `certified_k` candidates are proved to be in their true place, so every other token's
logit is at most that of the last certified one. A choice is made only where this decides it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.runtime.noise import NoiseKey, draw_bits, gumbel
from headport.runtime.sampler import Sampling, choose, scale

__all__ = ["CandidateRow", "decide"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CandidateRow:
    """The certified candidates of one row, best first, ties by lowest id."""

    ids: Int64  # original ids, [C]
    logits: Float32  # [C]


def decide(row: CandidateRow, ids: Int64, sampling: Sampling, key: NoiseKey | None) -> int | None:
    """The token that the full row of logits would give, or None where that is not proved.

    Args:
        row: Certified candidates.
        ids: All original ids that the head knows, ascending, [K].
        sampling: How to choose.
        key: Key of the noise; None only where the temperature is 0.
    """
    if len(row.ids) == 0:
        return None
    if sampling.temperature == 0.0:
        return int(row.ids[row.logits == row.logits[0]].min())
    assert key is not None
    if 0 < sampling.top_k < len(ids):
        return _within_top_k(row, ids, sampling, key)
    if sampling.filters:
        return None  # the mass of all the others is not known exactly
    return _by_bound(row, ids, sampling.temperature, key)


def _within_top_k(row: CandidateRow, ids: Int64, sampling: Sampling, key: NoiseKey) -> int | None:
    """Once the k best and their ties are certified, the rest of the row plays no part."""
    if len(row.ids) < sampling.top_k:
        return None
    kept = row.logits >= row.logits[sampling.top_k - 1]
    if kept.all() and len(row.ids) < len(ids):
        return None  # a token outside may tie with the k-th
    order = np.argsort(row.ids[kept])
    return choose(row.logits[kept][order], row.ids[kept][order], sampling, key)


def _by_bound(row: CandidateRow, ids: Int64, temperature: float, key: NoiseKey) -> int | None:
    """The best noisy candidate wins if it beats the last logit with the best other noise."""
    bits = draw_bits(key, int(ids[-1]) + 1)
    scaled = scale(row.logits, temperature)
    scores = scaled + gumbel(bits[row.ids])
    winner = int(row.ids[scores == scores.max()].min())
    others = np.setdiff1d(ids, row.ids, assume_unique=True)
    if len(others) == 0:
        return winner
    limit = scaled[-1] + gumbel(bits[others].max(keepdims=True))[0]
    return winner if scores.max() > limit else None
