"""What leaves the less likely tokens out of a draw: one row of a table per filter, in order.

Order and meaning are those of transformers 5.24 (`generation/logits_process.py`); arithmetic is
float64. Each filter is a pure function of one row of scores, all of them finite; each acts on what
the ones before it left. Sums run in the order that is stated, one by one, so that another language
can give the same last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.runtime.sampling.settings import Sampling

__all__ = [
    "FILTERS",
    "Filter",
    "keep",
    "keep_epsilon",
    "keep_eta",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "keep_typical",
    "log_softmax",
    "scale",
]

Scores = npt.NDArray[Any]  # float32 as the head gives them, or float64 as processors leave them
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def scale(scores: Scores, temperature: float) -> Float64:
    """(z - max z) / T in float64: 0 for the largest score, never an overflow. [K] → [K]."""
    scaled = scores.astype(np.float64)
    scaled -= float(scores.max())
    with np.errstate(over="ignore"):
        scaled /= temperature
    return scaled


def log_softmax(scores: Scores, temperature: float = 1.0) -> Float64:
    """S - ln Σ exp(s) of s = `scale(scores, temperature)`, summed in ascending position. [K]."""
    scaled = scale(scores, temperature)
    total: float = np.cumsum(np.exp(scaled))[-1]
    scaled -= math.log(total)
    return scaled


def keep_top_k(scores: Scores, k: int) -> Mask:
    """Every score not below the k-th largest, so ties at the k-th place all stay. [K] → [K]."""
    size = len(scores)
    place = size - min(k, size)
    mask: Mask = scores >= np.partition(scores, place)[place]
    return mask


def keep_top_p(scores: Scores, temperature: float, p: float) -> Mask:
    """The most likely tokens whose mass reaches p; the most likely one always stays. [K] → [K].

    A token goes if it and all less likely ones together have a mass of 1 - p or less. Masses are
    summed in ascending order, one by one; among equal scores the highest positions go first.

    Source: Holtzman et al. 2019, arXiv:1904.09751.
    """
    ascending = np.sort(scores)
    mass = scale(ascending, temperature)
    np.cumsum(np.exp(mass, out=mass), out=mass)
    gone = int(np.searchsorted(mass, (1.0 - p) * mass[-1], side="right"))
    gone = min(gone, len(scores) - 1)
    last = ascending[gone]
    mask: Mask = scores > last
    ties = np.flatnonzero(scores == last)
    mask[ties[: len(scores) - gone - int(mask.sum())]] = True
    return mask


def keep_min_p(scores: Scores, temperature: float, p: float) -> Mask:
    """Tokens at least p times as likely as the most likely one. [K] → [K].

    Source: Nguyen et al. 2024, arXiv:2407.01082.
    """
    mask: Mask = scale(scores, temperature) >= math.log(p)
    return mask


def _entropy(log_p: Float64) -> float:
    """-Σ p ln p in nats, in ascending position; a mass of 0 adds nothing."""
    p = np.exp(log_p)
    terms = np.zeros(len(p))
    np.multiply(p, log_p, out=terms, where=p > 0)
    return -float(np.cumsum(terms)[-1])


def keep_typical(scores: Scores, temperature: float, mass: float) -> Mask:
    """The tokens whose surprise is nearest the entropy, until their mass reaches `mass`. [K] → [K].

    Distances are |-ln p - H|. In ascending order of (distance, position) the masses are summed;
    with n sums below `mass`, what is farther than the one at place n (from 0) goes, ties stay.

    Source: Meister et al. 2022, arXiv:2202.00666.
    """
    log_p = log_softmax(scores, temperature)
    distance = np.abs(-log_p - _entropy(log_p))
    order = _ascending(distance, log_p)
    below = int((np.cumsum(np.exp(log_p[order])) < mass).sum())
    mask: Mask = distance <= distance[order[min(below, len(order) - 1)]]
    return mask


def _ascending(distance: Float64, log_p: Float64) -> Int64:
    """Positions by ascending distance; ties by position, where it changes a sum."""
    order: Int64 = np.argsort(distance)  # many times faster than a stable one
    tied = distance[order[1:]] == distance[order[:-1]]
    if (tied & (log_p[order[1:]] != log_p[order[:-1]])).any():
        order = np.argsort(distance, kind="stable")
    return order


def _keep_above(scores: Scores, log_p: Float64, least: float) -> Mask:
    """Probabilities of `least` or more; the most likely ones stay in any case."""
    mask: Mask = (np.exp(log_p) >= least) | (scores == scores.max())
    return mask


def keep_epsilon(scores: Scores, temperature: float, epsilon: float) -> Mask:
    """Probabilities of ε or more; the most likely ones stay in any case. [K] → [K].

    Source: Hewitt et al. 2022, arXiv:2210.15191.
    """
    return _keep_above(scores, log_softmax(scores, temperature), epsilon)


def keep_eta(scores: Scores, temperature: float, epsilon: float) -> Mask:
    """As `keep_epsilon` with η = min(ε, √ε · exp(-H)), H the entropy. [K] → [K].

    Source: Hewitt et al. 2022, arXiv:2210.15191.
    """
    log_p = log_softmax(scores, temperature)
    eta = min(epsilon, math.sqrt(epsilon) * math.exp(-_entropy(log_p)))
    return _keep_above(scores, log_p, eta)


@dataclass(frozen=True)
class Filter:
    """One filter: when it acts, and which positions of a row it leaves, never none."""

    name: str
    acts: Callable[[Sampling], bool]
    keep: Callable[[Scores, Sampling], Mask]


FILTERS: tuple[Filter, ...] = (
    Filter("top_k", lambda s: s.top_k > 0, lambda z, s: keep_top_k(z, s.top_k)),
    Filter("top_p", lambda s: s.top_p < 1.0, lambda z, s: keep_top_p(z, s.temperature, s.top_p)),
    Filter("min_p", lambda s: s.min_p > 0.0, lambda z, s: keep_min_p(z, s.temperature, s.min_p)),
    Filter(
        "typical_p",
        lambda s: s.typical_p < 1.0,
        lambda z, s: keep_typical(z, s.temperature, s.typical_p),
    ),
    Filter(
        "epsilon_cutoff",
        lambda s: s.epsilon_cutoff > 0.0,
        lambda z, s: keep_epsilon(z, s.temperature, s.epsilon_cutoff),
    ),
    Filter(
        "eta_cutoff",
        lambda s: s.eta_cutoff > 0.0,
        lambda z, s: keep_eta(z, s.temperature, s.eta_cutoff),
    ),
)


def keep(scores: Scores, sampling: Sampling) -> Int64:
    """Positions that all filters leave, ascending, never none. Needs a temperature above 0."""
    positions = np.arange(len(scores), dtype=np.int64)
    for each in FILTERS:
        if each.acts(sampling):
            positions = positions[each.keep(scores[positions], sampling)]
    return positions
