"""Two reports on the same texts: what became better, worse, or lies within the noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from headport.validate.baseline import change_of_documents, same_documents
from headport.validate.certainty import student_quantile
from headport.validate.evidence import Record
from headport.validate.report import DocumentSummary, Metric, Metrics, Report
from headport.validate.top_rows import BOUNDED_METRICS

__all__ = ["DECISIVE", "Change", "Outcome", "changes"]

Outcome = Literal["better", "worse", "within noise", "unknown"]


class Change(Record, frozen=True):
    """One figure of one slice in both reports."""

    metric: str
    slice: str | None  # None: all texts together
    before: float | None
    now: float | None
    change: float | None  # now - before; of a perplexity, of its logarithm
    low: float | None  # 95 % interval of the change; None: none is known
    high: float | None
    paired: bool  # over the same documents; else the two intervals are taken as independent
    outcome: Outcome


@dataclass(frozen=True)
class _Compared:
    """A figure, which way it is better, and how it is found in a document's means."""

    metric: str
    larger_is_better: bool
    of_document: Callable[[DocumentSummary], float] | None = None  # None: not kept by document
    logarithm: bool = False


_COMPARED = (
    _Compared("kl_mean", False, lambda d: d.kl),
    _Compared("top1_agreement", True, lambda d: d.top1_agreement),
    _Compared("perplexity_candidate", False, lambda d: d.nll_candidate, logarithm=True),
    _Compared("top5_agreement", True),
    _Compared("top10_agreement", True),
    _Compared("kl_reverse_mean", False),
    _Compared("total_variation_mean", False),
    _Compared("delta_p_rms", False),
)
# Kept by document, so that every report of two documents has their intervals.
DECISIVE = tuple(row.metric for row in _COMPARED if row.of_document is not None)


def changes(before: Report, now: Report) -> tuple[Change, ...]:
    """Every compared figure, of all texts together and of each text.

    A figure is better or worse if the whole 95 % interval of its change lies on one side of zero.
    Where only the reference's likeliest tokens are known, what is then a bound is left out.

    Args:
        before: The earlier report.
        now: One that `baseline.check_comparable` lets stand beside it.
    """
    earlier = {part.name: part.metrics for part in before.slices}
    slices: list[tuple[str | None, Metrics, Metrics]] = [(None, before.metrics, now.metrics)]
    slices += [(part.name, earlier[part.name], part.metrics) for part in now.slices]
    bounds = BOUNDED_METRICS if now.protocol.top_only else ()
    rows = [row for row in _COMPARED if not row.metric.startswith(bounds)]
    found = []
    for name, old, new in slices:
        documents = _of(before.by_document, name), _of(now.by_document, name)
        for row in rows:
            pair = getattr(old, row.metric), getattr(new, row.metric)
            found.append(_change(row, name, pair, documents))
    return tuple(found)


_Documents = Sequence[DocumentSummary]


def _of(documents: _Documents, name: str | None) -> _Documents:
    return [d for d in documents if name in (None, d.slice)]


def _change(
    row: _Compared,
    name: str | None,
    metrics: tuple[Metric, Metric],
    documents: tuple[_Documents, _Documents],
) -> Change:
    old, new = metrics
    paired = row.of_document is not None and len(documents[1]) > 1 and same_documents(*documents)
    difference = low = high = None
    if row.of_document is not None and paired:
        difference, low, high = change_of_documents(row.of_document, *documents)
    elif old.value is not None and new.value is not None:
        difference, low, high = _independent(row, old, new)
    return Change(
        metric=row.metric,
        slice=name,
        before=old.value,
        now=new.value,
        change=difference,
        low=low,
        high=high,
        paired=paired,
        outcome=_outcome(row, low, high),
    )


def _independent(
    row: _Compared, old: Metric, new: Metric
) -> tuple[float, float | None, float | None]:
    """Difference of two figures whose errors are taken as independent.

    Both are about the same texts, so their errors mostly rise and fall together: the interval is
    wider than it need be.
    """
    assert old.value is not None and new.value is not None
    a, b = old.value, new.value
    scales = (1 / a, 1 / b) if row.logarithm else (1.0, 1.0)
    if row.logarithm:
        a, b = math.log(a), math.log(b)
    if old.error is None or new.error is None:
        return b - a, None, None
    half = student_quantile(10_000) * math.hypot(old.error * scales[0], new.error * scales[1])
    return b - a, b - a - half, b - a + half


def _outcome(row: _Compared, low: float | None, high: float | None) -> Outcome:
    if low is None or high is None:
        return "unknown"
    if low <= 0 <= high:
        return "within noise"
    return "better" if (low > 0) == row.larger_is_better else "worse"
