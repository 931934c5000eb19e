"""From sums per document to the figures of a report: one row of a table per figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.metrics import TOP_K
from headport.validate.certainty import Estimate, bounds, positive_bounds, ratio, share_bounds
from headport.validate.report import Metric, Metrics
from headport.validate.sums import Part

__all__ = ["FIGURES", "Figure", "figures"]

Float64 = npt.NDArray[np.float64]

_LN2 = math.log(2)


@dataclass(frozen=True)
class Figure:
    """How a figure comes from a slice's sums."""

    name: str  # a field of `Metrics`
    of: Callable[[Part], Metric]
    interval: bool = True  # False: an extreme or a percentile, which is what it is


def _metric(estimate: Estimate, interval: tuple[Float64, Float64]) -> Metric:
    low, high = interval
    return Metric(
        value=_finite(float(estimate.value)),
        low=_finite(float(low)),
        high=_finite(float(high)),
        error=_finite(float(estimate.error)),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _share(name: str, column: str) -> Figure:
    def of(part: Part) -> Metric:
        found = ratio(part.column(column), part.weights)
        return _metric(found, share_bounds(found, np.asarray(part.tokens, np.float64)))

    return Figure(name, of)


_Transform = Callable[[Metric], Metric]


def _mean(name: str, column: str, transform: _Transform | None = None) -> Figure:
    def of(part: Part) -> Metric:
        found = ratio(part.column(column), part.weights)
        metric = _metric(found, bounds(found))
        return metric if transform is None else transform(metric)

    return Figure(name, of)


def _positive(name: str, column: str) -> Figure:
    def of(part: Part) -> Metric:
        found = ratio(part.column(column), part.weights)
        return _metric(found, positive_bounds(found))

    return Figure(name, of)


def _exp(metric: Metric) -> Metric:
    """Exponential of a figure and its interval; the error by the delta method."""
    found = (metric.value, metric.low, metric.high)
    value, low, high = (None if v is None else _finite(_exp_or_inf(v)) for v in found)
    error = None if value is None or metric.error is None else _finite(value * metric.error)
    return Metric(value=value, low=low, high=high, error=error)


def _exp_or_inf(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf


def _root(metric: Metric) -> Metric:
    """Square root of a figure that is not negative, and of its interval."""
    values = (metric.value, metric.low, metric.high)
    value, low, high = (None if v is None else math.sqrt(max(v, 0.0)) for v in values)
    error = metric.error / (2 * value) if value and metric.error is not None else None
    return Metric(value=value, low=low, high=high, error=error)


def _ratio_of_perplexities(part: Part) -> Metric:
    drift = part.column("nll_candidate") - part.column("nll_reference")
    found = ratio(drift, part.weights)
    return _exp(_metric(found, bounds(found)))


def _bits(name: str, column: str) -> Figure:
    def of(part: Part) -> Metric:
        found = ratio(part.column(column) / _LN2, part.bytes)
        return _metric(found, bounds(found))

    return Figure(name, of)


def _quantile(name: str, column: str, share: float) -> Figure:
    def of(part: Part) -> Metric:
        values = part.kept[column]
        found = float(np.quantile(values.astype(np.float64), share)) if len(values) else math.nan
        return Metric(value=_finite(found))

    return Figure(name, of, interval=False)


# As `llama-perplexity --kl-divergence` prints them; linear between ranks, as it does.
_KL_RANKS = ("max", "p99_9", "p99", "p95", "p90", "p50", "p10", "p5", "p1", "p0_1", "min")
_DELTA_P_RANKS = (*_KL_RANKS[:5], "p75", "p50", "p25", *_KL_RANKS[6:])


def _share_of(rank: str) -> float:
    if rank in ("min", "max"):
        return float(rank == "max")
    return float(rank[1:].replace("_", ".")) / 100


# The order is that of the report.
FIGURES: tuple[Figure, ...] = (
    *(_share(f"top{k}_agreement", f"top{k}") for k in TOP_K),
    *(_share(f"top{k}_agreement_tie_adjusted", f"top{k}_tie_adjusted") for k in TOP_K),
    *(_share(f"top{k}_order", f"order{k}") for k in TOP_K[1:]),
    *(_share(f"top{k}_order_tie_adjusted", f"order{k}_tie_adjusted") for k in TOP_K[1:]),
    _mean("reference_top1_rank_mean", "rank"),
    _mean("perplexity_reference", "nll_reference", _exp),
    _mean("perplexity_candidate", "nll_candidate", _exp),
    Figure("perplexity_ratio", _ratio_of_perplexities),
    _bits("bits_per_byte_reference", "nll_reference"),
    _bits("bits_per_byte_candidate", "nll_candidate"),
    _positive("kl_mean", "kl"),
    *(_quantile(f"kl_{rank}", "kl", _share_of(rank)) for rank in _KL_RANKS),
    _positive("kl_reverse_mean", "kl_reverse"),
    _positive("total_variation_mean", "total_variation"),
    _mean("delta_p_mean", "delta_p"),
    _mean("delta_p_rms", "delta_p_squared", _root),
    *(_quantile(f"delta_p_{rank}", "delta_p", _share_of(rank)) for rank in _DELTA_P_RANKS),
    _quantile("max_abs_logit_error", "max_abs_error", 1.0),
    _quantile("max_abs_logit_error_p99", "max_abs_error", 0.99),
    _quantile("max_abs_logit_error_p50", "max_abs_error", 0.5),
)


def figures(part: Part) -> Metrics:
    """All figures of one slice."""
    return Metrics(**{figure.name: figure.of(part) for figure in FIGURES})
