"""Drift statistics: reference logits and candidate logits in, figures per position out.

Notation, per position: z reference logits [V], c candidate logits [V], y the token that follows,
p = softmax(z), q = softmax(c). Every row is computed alone, so no figure depends on batching.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headport.errors import NonFiniteError

__all__ = ["TOP_K", "RowScores", "score_rows", "top_ids"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

TOP_K = (1, 5, 10)
_BLOCK_ELEMENTS = 1 << 18  # logits per block: small enough that the temporaries stay in cache
_GROUPED_ABOVE = 1024  # vocabulary size from which a threshold is found before sorting
_GROUP = 32
# Largest |c − z| for which the series below is used; beyond it a row is computed in float64.
_SERIES_LIMIT = 0.5
# (exp(e) − 1 − e) / e² = Σ eᵏ / (k + 2)!; nine terms leave 7e-8, relative, at |e| = 1.
_SERIES = tuple(1.0 / math.factorial(k + 2) for k in range(9))
# Largest |e| up to which n terms leave at most 1e-7: the first one left out is eⁿ / (n + 2)!, and
# the sum at least 1/2 − 1/6.
_SERIES_REACH = tuple((1e-7 * math.factorial(n + 2) / 3) ** (1 / n) for n in range(1, 9))


@dataclass(frozen=True)
class RowScores:
    """Figures of N positions; columns of the agreements follow `TOP_K`."""

    nll_reference: Float64  # [N], nats
    nll_candidate: Float64  # [N], nats
    kl: Float64  # [N], KL(p ‖ q), nats
    kl_reverse: Float64  # [N], KL(q ‖ p), nats
    total_variation: Float64  # [N], ½ Σ_v |p_v − q_v|, in [0, 1]
    max_abs_error: Float64  # [N], max_v |c_v − z_v|, logits
    rank: Float64  # [N], place of the reference's first choice among the candidate's, from 1
    agreement: Float64  # [N, 3], |top-k(z) ∩ top-k(c)| / k
    agreement_tie_adjusted: Float64  # [N, 3]
    order: Float64  # [N, 3], share of the first k places that hold the same token
    order_tie_adjusted: Float64  # [N, 3]

    def __len__(self) -> int:
        return len(self.kl)

    @property
    def delta_p(self) -> Float64:
        """q(y) − p(y), [N]: how much likelier the candidate thinks the token that follows."""
        p = np.exp(-self.nll_reference)
        return p * np.expm1(self.nll_reference - self.nll_candidate)

    @classmethod
    def concatenate(cls, parts: Sequence[RowScores]) -> RowScores:
        """The positions of several parts, in order; of none, zero positions."""
        if not parts:
            none, wide = np.zeros(0), np.zeros((0, len(TOP_K)))
            return cls(*(wide if f.name in _WIDE else none for f in fields(cls)))
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)))


_WIDE = ("agreement", "agreement_tie_adjusted", "order", "order_tie_adjusted")


class _Distances(NamedTuple):
    """Distances of some rows, each [N]."""

    nll_reference: Float64
    nll_candidate: Float64
    kl: Float64
    kl_reverse: Float64
    total_variation: Float64
    max_abs_error: Float64


def top_ids(logits: Float32, k: int) -> Int64:
    """Ids of the k largest logits of each row, largest first, ties by lowest id.

    Args:
        logits: [N, V], without NaN.
        k: At most V ids are returned.

    Returns:
        [N, min(k, V)].
    """
    rows, vocab_size = logits.shape
    k = min(k, vocab_size)
    if vocab_size <= _GROUPED_ABOVE:
        return np.argsort(-logits, axis=1, kind="stable")[:, :k].astype(np.int64)
    # The k-th largest of the maxima of disjoint groups is at most the k-th largest logit, so
    # only the few logits at or above it need sorting.
    whole = vocab_size - vocab_size % _GROUP
    maxima = logits[:, :whole].reshape(rows, _GROUP, -1).max(axis=1)
    if whole < vocab_size:
        maxima = np.concatenate([maxima, logits[:, whole:]], axis=1)
    threshold = np.partition(maxima, -k, axis=1)[:, -k]
    found = np.empty((rows, k), np.int64)
    for row in range(rows):
        ids = np.flatnonzero(logits[row] >= threshold[row])  # ascending, which settles ties
        order = np.argsort(-logits[row, ids], kind="stable")
        found[row] = ids[order[:k]]
    return found


def score_rows(
    reference: Float32, candidate: Float32, targets: Int64, near_tie_bound: Float64
) -> RowScores:
    """Compare the logits of N positions.

    KL uses c = z + Δ: with m = E_p[Δ] and e = Δ − m,
    KL(p ‖ q) = log E_p[exp(e)] = log1p(E_p[exp(e) − 1 − e]), because E_p[e] = 0; and
    logsumexp(c) = logsumexp(z) + m + KL. All terms of the expectation are ≥ 0, so nothing
    cancels: float32 terms summed in float64 give KL to about 1e-6 *relative*, however small it
    is, where a difference of two float32 log-sum-exps would carry noise of 1e-7 absolute. NLLs
    are right to about 1e-7. Rows with max |Δ| > 0.5 are computed in float64 throughout.

    Args:
        reference: z, [N, V].
        candidate: c, [N, V].
        targets: y, [N], in [0, V).
        near_tie_bound: [N], ≥ 0: reference logits closer than this count as tied.

    Raises:
        NonFiniteError: If a logit is NaN or infinite; −∞ on both sides is a removed token and
            allowed.
    """
    if reference.shape != candidate.shape:
        raise ValueError(f"logits of equal shape expected, {reference.shape} {candidate.shape}")
    step = max(1, _BLOCK_ELEMENTS // reference.shape[1])
    blocks = [slice(start, start + step) for start in range(0, len(reference), step)]
    return RowScores.concatenate(
        [
            _score_block(reference[block], candidate[block], targets[block], near_tie_bound[block])
            for block in blocks
        ]
    )


def _score_block(z: Float32, c: Float32, targets: Int64, bound: Float64) -> RowScores:
    with np.errstate(invalid="ignore", over="ignore"):  # such rows are computed below
        delta = c - z
        error = np.abs(np.maximum(delta.max(axis=1), -delta.min(axis=1))).astype(np.float64)
        # By row, so that no figure depends on what else is in the block; |e| ≤ 2 max |Δ|.
        close = error <= _SERIES_LIMIT
        terms = np.where(close, 1 + np.searchsorted(_SERIES_REACH, 2 * error), 0)
        kinds = np.unique(terms[close])
        if len(kinds) == 1 and close.all():
            found = _close_rows(z, delta, targets, error, int(kinds[0]))
        else:
            found = _Distances(*np.empty((len(_Distances._fields), len(z))))
            for kind in kinds:
                rows = terms == kind
                some = _close_rows(z[rows], delta[rows], targets[rows], error[rows], int(kind))
                for all_values, own_values in zip(found, some, strict=True):
                    all_values[rows] = own_values
    for row in np.flatnonzero(~close):  # NaN included
        exact = _distant_row(z[row], c[row], targets[row])
        for values, value in zip(found, exact, strict=True):
            values[row] = value
    return RowScores(*found, *_places(z, c, bound))


def _close_rows(
    z: Float32, delta: Float32, targets: Int64, error: Float64, terms: int
) -> _Distances:
    """Distances by the series, for max |Δ| ≤ 0.5.

    With S = E_p[exp(e) − 1 − e], q / p = exp(e) / (1 + S), hence
    KL(q ‖ p) = E_p[e (exp(e) − 1)] / (1 + S) − log1p(S), and
    ½ Σ |p − q| = ½ E_p|exp(e) − 1 − S| / (1 + S).
    """
    rows = np.arange(len(z))
    top = z.max(axis=1)
    p = z - top[:, None]
    np.exp(p, out=p)
    total = p.sum(axis=1, dtype=np.float64)
    mean = _dot(p, delta) / total
    # Rounding `mean` here shifts e by some ε; the series drops E_p[e], so KL moves by ε² / 2.
    e = delta - mean.astype(np.float32)[:, None]
    series = np.full_like(e, _SERIES[terms - 1])
    for coefficient in _SERIES[:terms][-2::-1]:
        series *= e
        series += np.float32(coefficient)
    series *= e
    series *= e
    excess = _dot(p, series) / total
    series += e  # exp(e) − 1
    e *= series
    tilted = _dot(p, e) / total
    series -= excess.astype(np.float32)[:, None]
    variation = _dot(p, np.abs(series, out=series)) / total
    kl = np.log1p(excess)
    nll_z = top + np.log(total) - z[rows, targets].astype(np.float64)
    nll_c = nll_z + mean + kl - delta[rows, targets]
    reverse = np.maximum(tilted / (1 + excess) - kl, 0.0)
    return _Distances(nll_z, nll_c, kl, reverse, variation / (2 * (1 + excess)), error)


def _dot(a: Float32, b: Float32) -> Float64:
    products: Float32 = np.matmul(a[:, None, :], b[:, :, None])
    return products[:, 0, 0].astype(np.float64)


def _distant_row(z32: Float32, c32: Float32, target: Any) -> tuple[float, ...]:
    """Distances by their definitions, in float64; one exponential for each side."""
    z, c = z32.astype(np.float64), c32.astype(np.float64)
    delta = _difference(z, c)
    (log_p, p, log_sum_p), (log_q, q, log_sum_q) = _softmax(z), _softmax(c)
    # ln p − ln q = −Δ + top and log-sum of each side, which a removed token does not enter.
    shift = (c.max() + log_sum_q) - (z.max() + log_sum_p)
    return (
        float(log_sum_p - log_p[target]),
        float(log_sum_q - log_q[target]),
        max(float(shift - p @ delta), 0.0),
        max(float(q @ delta - shift), 0.0),
        float(np.abs(p - q).sum()) / 2,
        float(np.abs(delta).max()),
    )


def _difference(z: Float64, c: Float64) -> Float64:
    """Δ = c − z, 0 where a token was removed on both sides."""
    if np.isfinite(z).all() and np.isfinite(c).all():
        return c - z
    kept = ~(np.isneginf(z) & np.isneginf(c))
    if not kept.any():
        raise NonFiniteError("finite logits expected, both sides give −inf for every token")
    for side, logits in (("reference", z), ("candidate", c)):
        bad = np.flatnonzero(kept & ~np.isfinite(logits))
        if len(bad):
            raise NonFiniteError(
                f"finite logits expected, the {side} gives {logits[bad[0]]} for token id "
                f"{bad[0]} ({len(bad)} such logits in one position)"
            )
    return np.subtract(c, z, out=np.zeros_like(z), where=kept)


def _softmax(x: Float64) -> tuple[Float64, Float64, float]:
    """Shifted logits x − max x, softmax(x), and ln Σ exp(x − max x)."""
    shifted = x - x.max()
    p = np.exp(shifted)
    total = p.sum()
    p /= total
    return shifted, p, float(np.log(total))


def _places(z: Float32, c: Float32, bound: Float64) -> tuple[Float64, ...]:
    """Rank of the reference's first choice, and agreement of the best k as sets and in order.

    Tie-adjusted, a member of the candidate's best k also counts if its reference logit is at least
    the reference's k-th logit minus the bound, and a place if the reference logits of the two
    tokens that hold it differ by at most the bound: within it, the order is decided by rounding.
    """
    wanted, found = top_ids(z, TOP_K[-1]), top_ids(c, TOP_K[-1])
    z_wanted = np.take_along_axis(z, wanted, axis=1).astype(np.float64)
    z_found = np.take_along_axis(z, found, axis=1).astype(np.float64)
    same = wanted == found
    with np.errstate(invalid="ignore"):  # −∞ − −∞: removed tokens, which hold the same place
        close = same | (np.abs(z_found - z_wanted) <= bound[:, None])
    shares = [np.empty((len(z), len(TOP_K))) for _ in range(4)]
    for column, k in enumerate(TOP_K):
        best = found[:, :k]  # fewer than k where the vocabulary is smaller
        inside = (best[:, :, None] == wanted[:, None, :k]).any(axis=2)
        near = z_found[:, :k] >= (z_wanted[:, best.shape[1] - 1] - bound)[:, None]
        columns = (inside, inside | near, same[:, :k], close[:, :k])
        for share, values in zip(shares, columns, strict=True):
            share[:, column] = values.mean(axis=1)
    return _rank(c, wanted[:, 0], found), *shares


def _rank(c: Float32, wanted: Int64, found: Int64) -> Float64:
    """1-based place of `wanted` [N] in the order of c, ties by lowest id."""
    hit = found == wanted[:, None]
    rank: Float64 = hit.argmax(axis=1) + 1.0
    for row in np.flatnonzero(~hit.any(axis=1)):  # beyond the best ten: counted
        own = c[row, wanted[row]]
        above = np.count_nonzero(c[row] > own)
        rank[row] = 1 + above + np.count_nonzero(c[row, : wanted[row]] == own)
    return rank
