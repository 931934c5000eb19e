"""Choosing from a head that gives its best candidates instead of all logits.

Every candidate's logit is exact up to `error`, and no other token's logit (+ noise, where noise
was handed to the head) is above `cut`. A choice is made only where this decides it: the token is
then the one that exact logits of the whole vocabulary would give. `SAMPLING.md` has the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.runtime.sampling.noise import NoiseKey, draw_bits, gumbel, gumbel_bound
from headport.runtime.sampling.sampler import filtering
from headport.runtime.sampling.settings import Sampling

__all__ = ["CandidateRow", "decide", "decide_noisy", "needs_all", "noise_row", "wants_noise"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
# Bounds of Σ exp((z - z₁) / T) over all tokens that are not candidates; asked for by top-p alone.
TailMass = Callable[[float], tuple[float, float]]

_ROUNDING = 2.0**-40  # relative, of a few float64 operations, exponentials included
_KEY_ROUNDING = 2.0**-23  # relative, of the head's float32 sum of bound and noise


@dataclass(frozen=True)
class CandidateRow:
    """The candidates of one row, best first, ties by lowest id."""

    ids: Int64  # original ids, [C]
    logits: Float64  # [C]
    proved: int  # how many leading ones are in their true place
    cut: float  # no other token's logit (+ noise) is above it
    error: float  # of a logit


def wants_noise(sampling: Sampling) -> bool:
    """Whether the head should pick its candidates by logit and noise, not by logit alone."""
    return sampling.temperature > 0.0 and not filtering(sampling)


def needs_all(sampling: Sampling) -> bool:
    """Whether candidates can never decide: what acts depends on the whole row."""
    if sampling.process_scores is not None:
        return True
    by_mass = sampling.typical_p < 1.0 or max(sampling.epsilon_cutoff, sampling.eta_cutoff) > 0.0
    return sampling.temperature > 0.0 and by_mass


def noise_row(ids: Int64, columns: int, temperature: float, key: NoiseKey) -> Float32:
    """What a head adds to its bounds: T times a bound of each token's noise, rounded up.

    Args:
        ids: Original id of each head column that is a token, [K].
        columns: Width of the head, at least K; the others get -inf.
        temperature: T, above 0.
        key: Key of the noise.

    Returns:
        float32 [columns].
    """
    bits = draw_bits(key, int(ids.max()) + 1)
    if len(ids) != len(bits) or ids[-1] != len(ids) - 1:
        bits = bits[ids]
    noise = np.full(columns, -np.inf, np.float32)
    scaled = gumbel_bound(bits) * np.float32(temperature)
    # Two roundings, of T and of the product, each at most 2^-24 of it.
    noise[: len(ids)] = scaled + np.abs(scaled) * np.float32(2.0**-22)
    return noise


def decide(
    row: CandidateRow, sampling: Sampling, key: NoiseKey | None, tail_mass: TailMass
) -> int | None:
    """The token that all exact logits would give, or None where that is not proved.

    Args:
        row: Candidates that were picked without noise.
        sampling: How to choose; `wants_noise` is false for it.
        key: Key of the noise; None only where the temperature is 0.
        tail_mass: Temperature → least and greatest mass of all other tokens.
    """
    if row.proved == 0:
        return None
    if sampling.temperature == 0.0:
        best = row.logits == row.logits[0]
        # Equal and proved: equal rows of the weight, of which the lowest original id wins.
        return int(row.ids[best].min()) if int(best.sum()) <= row.proved else None
    assert key is not None
    if sampling.top_k > 0:
        return _within_top_k(row, sampling, key)
    if sampling.top_p < 1.0:
        return _within_top_p(row, sampling, key, tail_mass)
    return _within_min_p(row, sampling, key)


def _within_top_k(row: CandidateRow, sampling: Sampling, key: NoiseKey) -> int | None:
    """Once the k best and their ties are proved, no other token plays a part."""
    k = sampling.top_k
    if len(row.ids) < k:
        if row.cut > -np.inf:
            return None
        k = len(row.ids)  # there are no others
    count = int((row.logits >= row.logits[k - 1]).sum())
    if count > row.proved:
        return None
    kept = CandidateRow(row.ids[:count], row.logits[:count], count, -np.inf, row.error)
    if sampling.top_p < 1.0:
        return _within_top_p(kept, sampling, key, lambda _: (0.0, 0.0))
    if sampling.min_p > 0.0:
        return _within_min_p(kept, sampling, key)
    winner = _best(kept, np.arange(count), sampling.temperature, key)
    return None if winner is None else int(kept.ids[winner])


def _within_top_p(
    row: CandidateRow, sampling: Sampling, key: NoiseKey, tail_mass: TailMass
) -> int | None:
    """The kept set grows with the total mass: what wins in the largest and is in the smallest."""
    T = sampling.temperature
    least, greatest = _above(row, T, -1), _above(row, T, 1)
    tail_low, tail_high = tail_mass(T)
    with np.errstate(over="ignore", invalid="ignore"):
        doubt = np.exp(row.error / T)  # of the tail, whose masses are in units of the first one's
        low = sampling.top_p * (least[-1] + tail_low / doubt) * (1 - _ROUNDING)
        high = sampling.top_p * (greatest[-1] + tail_high * doubt) * (1 + _ROUNDING)
    # A rank stays if the mass before it is below p of the total; the first always does.
    if not least[row.proved] >= high:
        return None
    fewest = max(1, int(np.searchsorted(greatest, low, side="left")))
    most = max(1, int(np.searchsorted(least, high, side="left")))
    if sampling.min_p > 0.0:
        limit = math.log(sampling.min_p)
        scaled = _scaled(row, T)
        slack = _slack(row, T)
        fewest = min(fewest, max(1, int((scaled >= limit + slack).sum())))
        most = min(most, max(1, int((scaled >= limit - slack).sum())))
    winner = _best(row, np.arange(most), T, key)
    return int(row.ids[winner]) if winner is not None and winner < fewest else None


def _within_min_p(row: CandidateRow, sampling: Sampling, key: NoiseKey) -> int | None:
    """Where the cut is below the threshold, every kept token is a candidate."""
    T = sampling.temperature
    limit, slack = math.log(sampling.min_p) if sampling.min_p > 0 else -np.inf, _slack(row, T)
    if not (row.cut - row.logits[0]) / T < limit - slack:
        return None
    scaled = _scaled(row, T)
    if (np.abs(scaled[1:] - limit) <= slack).any():
        return None
    kept = np.flatnonzero(scaled >= limit)
    winner = _best(row, kept if len(kept) else np.zeros(1, np.int64), T, key)
    return None if winner is None else int(row.ids[winner])


def decide_noisy(
    row: CandidateRow, sampling: Sampling, key: NoiseKey, largest: float | None = None
) -> int | None:
    """As `decide`, from candidates picked with `noise_row`.

    Args:
        row: Candidates that were picked with the noise of `key`.
        sampling: Temperature alone, or with min-p.
        key: Key of the noise.
        largest: The largest exact logit of the whole vocabulary, needed for min-p.
    """
    T = sampling.temperature
    winner = _best(row, np.arange(len(row.ids)), T, key)
    if winner is None:
        return None
    score = _scores(row, T, key)[winner]
    cut = row.cut + abs(row.cut) * _KEY_ROUNDING if np.isfinite(row.cut) else row.cut
    with np.errstate(over="ignore"):
        limit = (cut - row.logits[0]) / T
    if not score > limit + _slack(row, T):
        return None
    if sampling.min_p > 0.0:
        if largest is None:
            return None
        if not (row.logits[winner] - largest) / T >= math.log(sampling.min_p) + _slack(row, T):
            return None
    return int(row.ids[winner])


def _scaled(row: CandidateRow, temperature: float) -> Float64:
    with np.errstate(over="ignore"):
        scaled: Float64 = (row.logits - row.logits[0]) / temperature
    return scaled


def _above(row: CandidateRow, temperature: float, side: int) -> Float64:
    """Least (side -1) or greatest (1) mass of all tokens before each rank, [C + 1].

    The first token's mass is 1; of the others each difference of two logits may be off.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        masses = np.exp(_scaled(row, temperature) + side * 2 * row.error / temperature)
    masses[0] = 1.0
    return np.concatenate([[0.0], np.cumsum(masses)])


def _slack(row: CandidateRow, temperature: float) -> float:
    # Logits' own error in score units, and that of the few operations made with them.
    size = float(np.abs(row.logits).max()) / temperature
    return 4 * row.error / temperature + (size + 32.0) * _ROUNDING


def _scores(row: CandidateRow, temperature: float, key: NoiseKey) -> Float64:
    bits = draw_bits(key, int(row.ids.max()) + 1)
    return _scaled(row, temperature) + gumbel(bits[row.ids])


def _best(row: CandidateRow, among: Int64, temperature: float, key: NoiseKey) -> int | None:
    """Index of the best score among some candidates, None where two are too close to tell."""
    scores = _scores(row, temperature, key)[among]
    winner = int(np.argmax(scores))
    others = np.delete(scores, winner)
    second = float(others.max(initial=-np.inf))
    decided = scores[winner] - second > _slack(row, temperature)
    return int(among[winner]) if decided else None
