"""How sure a figure is: intervals clustered by document, and the sample a question needs.

Tokens of one document are alike, so documents are the independent units. Both sides are scored on
the same tokens, so every drift is a sum of paired differences. All functions take sums per
document along the last axis; leading axes are independent samples.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

__all__ = [
    "CONFIDENCE",
    "POWER",
    "Estimate",
    "bootstrap",
    "bounds",
    "detectable",
    "positive_bounds",
    "ratio",
    "share_bounds",
    "student_quantile",
    "tokens_for",
    "tokens_to_decide",
]

Float64 = npt.NDArray[np.float64]
_BLOCK_ELEMENTS = 1 << 22  # resampled counts at a time: 32 MiB

CONFIDENCE = 0.95  # of two-sided intervals, so a verdict errs in 2.5 % of all samples at most
POWER = 0.9  # with which the recommended sample finds the effect in question
_UPPER = (1 + CONFIDENCE) / 2
_MANY_DOCUMENTS = 1000  # from here on, Student's quantiles are the normal ones to 0.2 %


class Estimate:
    """A ratio of sums Σ y / Σ n over documents, and its cluster-robust standard error.

    With residuals r_g = y_g − m n_g of G documents, m the ratio, N = Σ n_g:
    SE² = (G − 1) / G · Σ (r_g / (1 − n_g / N))² / N².

    A long document pulls the ratio towards itself, so its residual is too small by 1 − n_g / N;
    without that factor, intervals of few, unequal documents are too narrow.

    Attributes:
        value: m; NaN where Σ n is 0.
        error: SE; NaN where there are fewer than two documents with n > 0.
        documents: G, those with n > 0.

    Source: the linearised ratio estimator, Cochran 1977, "Sampling Techniques", eq. 6.13, with the
    jackknife's correction for leverage (CR3), Bell & McCaffrey 2002, Survey Methodology 28(2);
    for documents of one length it equals the CR1 sandwich of Liang & Zeger 1986.
    """

    def __init__(self, sums: Float64, weights: Float64) -> None:
        """Estimate from Σ per document of the figure [..., D] and of its weights [..., D]."""
        with np.errstate(invalid="ignore", divide="ignore"):
            total = weights.sum(axis=-1)
            self.value = sums.sum(axis=-1) / total
            residuals = sums - self.value[..., None] * weights
            residuals = residuals / (1 - weights / total[..., None])
            self.documents = np.count_nonzero(weights, axis=-1)
            spread = (residuals**2).sum(axis=-1) * (self.documents - 1) / self.documents
            self.error = np.where(self.documents > 1, np.sqrt(spread) / total, np.nan)


def ratio(sums: Float64, weights: Float64) -> Estimate:
    """Σ sums / Σ weights with its standard error; see `Estimate`."""
    return Estimate(np.asarray(sums, np.float64), np.asarray(weights, np.float64))


@cache
def student_quantile(freedom: int, p: float = _UPPER) -> float:
    """Quantile of Student's t, p > 0.5, right to 1e-8 for 1 ≤ freedom.

    The distribution function is a finite sum for whole degrees of freedom; it is inverted by
    bisection.

    Source: Abramowitz & Stegun 1964, 26.7.3 and 26.7.4.
    """
    low, high = 0.0, 1.0
    while _student(high, freedom) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student(middle, freedom) < p else (low, middle)
    return high


def _student(t: float, freedom: int) -> float:
    if freedom > 2000:  # the normal distribution is closer than 1e-4 there, and the sum long
        return NormalDist().cdf(t * (1 - 1 / (4 * freedom)) / math.sqrt(1 + t * t / (2 * freedom)))
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    term = cosine if freedom % 2 else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + freedom % 2, freedom - 1, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    inside = math.sin(angle) * total
    if freedom % 2:
        inside = 2 / math.pi * (angle + inside)
    return 0.5 + inside / 2


def bounds(estimate: Estimate) -> tuple[Float64, Float64]:
    """Confidence interval of a mean: value ± t · SE with G − 1 degrees of freedom."""
    half = _quantiles(estimate) * estimate.error
    return estimate.value - half, estimate.value + half


def positive_bounds(estimate: Estimate) -> tuple[Float64, Float64]:
    """Confidence interval of a mean that cannot be negative, and is often skewed, such as a KL.

    exp(ln m ± t · SE / m): the interval of the logarithm, by the delta method. Few documents tend
    to lack the rare large values, so the symmetric interval ends too low too often.

    Source: Efron & Tibshirani 1993, "An Introduction to the Bootstrap", chapter 12, on scales on
    which an error is nearly normal.
    """
    m = estimate.value
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        factor = np.exp(_quantiles(estimate) * estimate.error / m)
        low, high = m / factor, m * factor
    nothing = (m == 0) & (estimate.error == 0)
    return np.where(nothing, 0.0, low), np.where(nothing, 0.0, high)


def share_bounds(estimate: Estimate, positions: Float64) -> tuple[Float64, Float64]:
    """Confidence interval of a share in [0, 1], also where it is 0 or 1 or close to them.

    Wilson's interval with the effective sample size m (1 − m) / SE². A sample without spread
    between documents, such as one without any flip, counts every position.

    Args:
        estimate: The share.
        positions: How many it is a share of, [...].

    Source: Wilson 1927, JASA 22; effective sample size: Korn & Graubard 1998, Survey Methodology
    24(2).
    """
    m, t = estimate.value, _quantiles(estimate)
    with np.errstate(invalid="ignore", divide="ignore"):
        effective = m * (1 - m) / estimate.error**2
        effective = np.where(np.isfinite(effective) & (effective > 0), effective, positions)
        effective = np.where(np.isnan(estimate.error), np.nan, effective)
        middle = (m + t**2 / (2 * effective)) / (1 + t**2 / effective)
        half = t / (1 + t**2 / effective)
        half = half * np.sqrt(np.maximum(m * (1 - m), 0) / effective + t**2 / (4 * effective**2))
    # Wilson's interval holds the share itself; rounding must not push it out.
    return np.clip(middle - half, 0, np.minimum(m, 1)), np.clip(middle + half, np.maximum(m, 0), 1)


def _quantiles(estimate: Estimate) -> Float64:
    counts = np.asarray(estimate.documents)
    found = {int(n): student_quantile(int(n) - 1) if n > 1 else math.nan for n in np.unique(counts)}
    quantiles: Float64 = np.vectorize(found.__getitem__, otypes=[np.float64])(counts)
    return quantiles


def bootstrap(
    sums: Float64, weights: Float64, *, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of Σ sums / Σ weights when whole documents are drawn again.

    Args:
        sums: [D].
        weights: [D].
        draws: Resamples.
        seed: Of the draws; the same sample always gives the same interval.

    Source: Efron 1979, Annals of Statistics 7(1); clusters drawn whole, Davison & Hinkley 1997,
    "Bootstrap Methods and their Application", section 3.8.
    """
    kept = weights > 0
    pairs = np.stack([sums[kept], weights[kept]], axis=1)
    count = len(pairs)
    if count < 2:
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    step = max(1, _BLOCK_ELEMENTS // count)
    found = []
    for start in range(0, draws, step):
        size = min(step, draws - start)
        times = rng.multinomial(count, np.full(count, 1 / count), size=size)
        total = times.astype(np.float64) @ pairs
        found.append(total[:, 0] / total[:, 1])
    low, high = np.quantile(np.concatenate(found), [1 - _UPPER, _UPPER])
    return float(low), float(high)


def detectable(error: float) -> float:
    """Smallest effect that a sample with this standard error finds with `POWER`."""
    return (NormalDist().inv_cdf(_UPPER) + NormalDist().inv_cdf(POWER)) * error


def tokens_for(effect: float, error: float, tokens: int, documents: int = 0) -> int | None:
    """Tokens of such documents with which an effect of this size is found with `POWER`.

    Args:
        effect: > 0, in units of the figure.
        error: Standard error that `tokens` tokens gave; it shrinks with their square root.
        tokens: > 0.
        documents: That they lie in. A few of them leave the error itself uncertain, which the
            interval makes good and the recommendation must pay for; 0: not known, as if many.
    """
    if effect <= 0:
        return None
    needed = _grown(detectable(error) / effect, tokens)
    if needed is None or documents < 2:
        return needed
    at_least = needed * documents / tokens  # by normal quantiles
    for count in range(max(2, math.ceil(at_least)), _MANY_DOCUMENTS):
        quantiles = student_quantile(count - 1) + student_quantile(count - 1, POWER)
        if quantiles * error * math.sqrt(documents / count) <= effect:
            return math.ceil(count * tokens / documents)
    return needed


def tokens_to_decide(distance: float, half_width: float, tokens: int) -> int | None:
    """Tokens with which an interval of this half width shrinks to `distance`.

    None where the figure lies on its limit, so that no number would decide.
    """
    return _grown(half_width / distance, tokens) if distance > 0 else None


def _grown(times: float, tokens: int) -> int | None:
    needed = tokens * times**2
    return math.ceil(needed) if math.isfinite(needed) and needed < 1e12 else None
