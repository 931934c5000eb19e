"""From one row of logits to one token: temperature → top-k → top-p → min-p → Gumbel argmax.

Order and meaning are those of transformers 5.24 (`generation/logits_process.py`), arithmetic is
float64; `SAMPLING.md` states every edge. Functions are pure and take one row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.errors import NonFiniteError
from headport.runtime.sampling.noise import NoiseKey, argmax_with_noise, draw_bits

__all__ = [
    "Sampling",
    "check_finite",
    "choose",
    "keep",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "scale",
]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from a row. The defaults are greedy and keep everything."""

    temperature: float = 0.0  # 0 = greedy: the filters and the seed play no part
    top_k: int = 0  # most likely tokens kept, ties at the last place included; 0 = all
    top_p: float = 1.0  # smallest most likely set with this mass or more; 1 = all
    min_p: float = 0.0  # least probability as a share of the largest one; 0 = all

    @property
    def filters(self) -> bool:
        """Whether any filter may remove a token."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def check_finite(logits: Float32, rows: Sequence[int], step: int) -> None:
    """Refuse rows from which no token can be drawn.

    Args:
        logits: [N, V].
        rows: The caller's name of each row.
        step: Index of the token that would be drawn.

    Raises:
        NonFiniteError: If a logit is NaN or infinite.
    """
    finite = np.isfinite(logits)
    if finite.all():
        return
    at = int(np.flatnonzero(~finite.all(axis=1))[0])
    broken = np.flatnonzero(~finite[at])
    raise NonFiniteError(
        f"row {rows[at]}, step {step}: {len(broken)} of {logits.shape[1]} logits are not finite "
        f"(first at position {broken[0]}: {logits[at, broken[0]]}); the bundle or its input is "
        "broken, `headport inspect BUNDLE --selftest` tells which"
    )


def scale(logits: Float32, temperature: float) -> Float64:
    """(z - max z) / T in float64: 0 for the largest logit, never an overflow. [K] → [K]."""
    scaled = logits.astype(np.float64)
    scaled -= float(logits.max())
    with np.errstate(over="ignore"):
        scaled /= temperature
    return scaled


def keep_top_k(logits: Float32, k: int) -> Mask:
    """Every logit not below the k-th largest, so ties at the k-th place all stay. [K] → [K]."""
    size = len(logits)
    place = size - min(k, size)
    mask: Mask = logits >= np.partition(logits, place)[place]
    return mask


def keep_top_p(logits: Float32, temperature: float, p: float) -> Mask:
    """The most likely tokens whose mass reaches p; the most likely one always stays. [K] → [K].

    A token goes if it and all less likely ones together have a mass of 1 - p or less. Masses are
    summed in ascending order, one by one; among equal logits the highest positions go first.
    """
    ascending = np.sort(logits)
    mass = scale(ascending, temperature)
    np.cumsum(np.exp(mass, out=mass), out=mass)
    gone = int(np.searchsorted(mass, (1.0 - p) * mass[-1], side="right"))
    gone = min(gone, len(logits) - 1)
    last = ascending[gone]
    mask: Mask = logits > last
    ties = np.flatnonzero(logits == last)
    mask[ties[: len(logits) - gone - int(mask.sum())]] = True
    return mask


def keep_min_p(logits: Float32, temperature: float, p: float) -> Mask:
    """Tokens at least p times as likely as the most likely one. [K] → [K]."""
    mask: Mask = scale(logits, temperature) >= math.log(p)
    return mask


def keep(logits: Float32, sampling: Sampling) -> Int64:
    """Positions that all filters leave, ascending, never none. Needs a temperature above 0."""
    positions = np.arange(len(logits), dtype=np.int64)
    temperature = sampling.temperature
    if 0 < sampling.top_k < len(logits):
        positions = positions[keep_top_k(logits, sampling.top_k)]
    if sampling.top_p < 1.0:
        positions = positions[keep_top_p(logits[positions], temperature, sampling.top_p)]
    if sampling.min_p > 0.0:
        positions = positions[keep_min_p(logits[positions], temperature, sampling.min_p)]
    return positions


def choose(logits: Float32, ids: Int64, sampling: Sampling, key: NoiseKey | None) -> int:
    """Choose a token.

    Args:
        logits: One row, finite, [V].
        ids: Original id of each position, ascending, [V].
        sampling: How to choose.
        key: Key of the noise; None only where the temperature is 0.

    Returns:
        The original id: the argmax of z where the temperature is 0, else of z / T + g over the
        kept ids. Ties go to the lowest id.
    """
    if sampling.temperature == 0.0:
        return int(ids[np.argmax(logits)])
    assert key is not None
    bits = draw_bits(key, int(ids[-1]) + 1)
    if sampling.filters:
        positions = keep(logits, sampling)
        logits, ids = logits[positions], ids[positions]
    if len(ids) != len(bits):
        bits = bits[ids]
    return int(ids[argmax_with_noise(scale(logits, sampling.temperature), bits)])
