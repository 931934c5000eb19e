"""A regression gate: figures against those of an earlier report on the same texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headport.errors import UsageError
from headport.validate.certainty import bounds, ratio, student_quantile
from headport.validate.evidence import Verdict
from headport.validate.report import DocumentSummary, Metric, Regression, Report

__all__ = [
    "LIMITS",
    "Limit",
    "change_of_documents",
    "check_comparable",
    "regressions",
    "same_documents",
]


@dataclass(frozen=True)
class Limit:
    """How much worse a figure may become."""

    metric: str
    of_document: Callable[[DocumentSummary], float]  # mean over one document; larger is worse
    of_metric: Callable[[float], float]  # the figure on the same scale
    margin: Callable[[float], float]  # from the baseline's figure on that scale


# A fifth of the default INT8 limit of flips and of perplexity drift; for KL a tenth of what the
# baseline had, but never less than rounding of float32 logits gives.
LIMITS = (
    Limit("kl_mean", lambda d: d.kl, lambda v: v, lambda base: max(0.1 * base, 1e-6)),
    Limit("top1_agreement", lambda d: -d.top1_agreement, lambda v: -v, lambda _: 0.004),
    Limit("perplexity_candidate", lambda d: d.nll_candidate, math.log, lambda _: 0.0006),
)


# What a report's figures are about; two reports that differ here cannot be compared.
_SUBJECT: dict[str, Callable[[Report], Any]] = {
    "texts": lambda report: {part.name: part.sha256 for part in report.slices},
    "window": lambda report: report.protocol.window,
    "overlap": lambda report: report.protocol.overlap,
    "condition": lambda report: report.protocol.condition,
    "tokens": lambda report: report.tokens_scored,
    "reference": lambda report: report.reference.sha256,
    "knowledge of the reference": lambda report: report.protocol.top_only,
}


def check_comparable(baseline: Report, report: Report, file: Path) -> None:
    """Refuse a baseline whose figures are about something else.

    Raises:
        UsageError: If texts, window or reference differ; all differences are named.
    """
    other = [name for name, of in _SUBJECT.items() if of(baseline) != of(report)]
    if other:
        raise UsageError(
            f"{file}: the same {', '.join(_SUBJECT)} expected as in this run, other "
            f"{', '.join(other)} found; validate the earlier release again on these texts"
        )


def regressions(baseline: Report, report: Report, file: Path) -> tuple[Regression, ...]:
    """Hold a report against an earlier one.

    A worsening passes if its whole 95 % interval is below the margin, fails if all of it is above,
    and is undecided in between. Documents are paired: the same text is hard for both releases, so
    most of its spread cancels.

    Raises:
        UsageError: If the two are not about the same texts and protocol.
    """
    check_comparable(baseline, report, file)
    return tuple(_regression(limit, baseline, report) for limit in LIMITS)


def _regression(limit: Limit, baseline: Report, report: Report) -> Regression:
    before: Metric = getattr(baseline.metrics, limit.metric)
    now: Metric = getattr(report.metrics, limit.metric)
    if before.value is None or now.value is None:
        return _outcome(limit, (before, now), math.nan, (None, None, None), paired=False)
    margin = limit.margin(limit.of_metric(before.value))
    paired = same_documents(baseline.by_document, report.by_document)
    if paired:
        found = change_of_documents(limit.of_document, baseline.by_document, report.by_document)
    else:
        found = _unpaired(limit, before, now)
    return _outcome(limit, (before, now), margin, found, paired=paired)


_Worsening = tuple[float | None, float | None, float | None]  # value, low, high


def same_documents(before: Sequence[DocumentSummary], now: Sequence[DocumentSummary]) -> bool:
    """Whether two reports hold the same documents, so that they can be paired."""
    keys = ([(d.slice, d.document, d.tokens) for d in documents] for documents in (before, now))
    return next(keys) == next(keys)


def change_of_documents(
    of_document: Callable[[DocumentSummary], float],
    before: Sequence[DocumentSummary],
    now: Sequence[DocumentSummary],
) -> _Worsening:
    """Mean change of a figure over paired documents, and its 95 % interval.

    Args:
        of_document: The figure, a mean over one document.
        before: Documents of one report.
        now: The same documents in another.
    """
    weights = np.array([d.tokens * d.weight for d in now])
    changes = [of_document(b) - of_document(a) for a, b in zip(before, now, strict=True)]
    found = ratio(np.array(changes) * weights, weights)
    low, high = (float(x) for x in bounds(found))
    return float(found.value), _known(low), _known(high)


def _unpaired(limit: Limit, before: Metric, now: Metric) -> _Worsening:
    assert before.value is not None and now.value is not None
    change = limit.of_metric(now.value) - limit.of_metric(before.value)
    if before.error is None or now.error is None:
        return change, None, None
    scale = 1 / before.value if limit.metric == "perplexity_candidate" else 1.0
    half = student_quantile(10_000) * math.hypot(before.error, now.error) * scale
    return change, change - half, change + half


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _outcome(
    limit: Limit,
    metrics: tuple[Metric, Metric],
    margin: float,
    worsening: _Worsening,
    *,
    paired: bool,
) -> Regression:
    value, low, high = worsening
    verdict: Verdict = "undecided"
    if value is not None and low is not None and high is not None:
        if high <= margin:
            verdict = "passed"
        elif low > margin:
            verdict = "failed"
    return Regression(
        metric=limit.metric,
        margin=margin if math.isfinite(margin) else 0.0,
        baseline=metrics[0].value,
        value=metrics[1].value,
        worsening=value,
        low=low,
        high=high,
        paired=paired,
        verdict=verdict,
    )
