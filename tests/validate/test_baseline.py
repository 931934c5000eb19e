"""A release against an earlier one: paired by document, worse only if that is sure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headport.errors import UsageError
from headport.validate.baseline import regressions
from headport.validate.report import DocumentSummary, Report
from tests.validate.reports import around, metrics, report

FILE = Path("before.json")


def release(kl: float, spread: float = 0.0, documents: int = 30, **changes: Any) -> Report:
    """A report whose documents differ a lot among each other, and have this mean KL."""
    by_document = tuple(
        DocumentSummary(
            slice="prose",
            document=i,
            tokens=100,
            weight=1.0,
            nll_reference=3.0 + 0.1 * i,
            nll_candidate=3.001 + 0.1 * i,
            kl=kl * (1 + 0.5 * (i % 3)) / 1.5 + spread * (-1) ** i,
            top1_agreement=0.99 - 0.001 * (i % 5),
        )
        for i in range(documents)
    )
    found = report(by_document=by_document, metrics=metrics(kl_mean=kl))
    return msgspec.structs.replace(found, **changes)


def verdicts(before: Report, now: Report) -> dict[str, str]:
    return {found.metric: found.verdict for found in regressions(before, now, FILE)}


def test_the_same_release_passes() -> None:
    assert set(verdicts(release(4e-4), release(4e-4)).values()) == {"passed"}


def test_a_worse_release_fails_and_a_better_one_passes() -> None:
    assert verdicts(release(4e-4), release(6e-4))["kl_mean"] == "failed"
    assert verdicts(release(4e-4), release(2e-4))["kl_mean"] == "passed"


def test_documents_are_paired_so_their_spread_cancels() -> None:
    (found, *_) = regressions(release(4e-4), release(4.1e-4), FILE)
    assert found.paired and found.worsening == pytest.approx(1e-5)
    assert found.margin == pytest.approx(4e-5)
    assert found.low is not None and found.high is not None
    assert found.high - found.low < 1e-5, "far less than the spread of KL between documents"


def test_too_few_documents_leave_it_undecided() -> None:
    noisy = release(4e-4, spread=2e-4, documents=4)
    assert verdicts(release(4e-4, documents=4), noisy)["kl_mean"] == "undecided"


def test_without_the_same_documents_intervals_are_independent() -> None:
    before = release(4e-4, metrics=metrics(kl_mean=None))
    before = msgspec.structs.replace(
        before, metrics=msgspec.structs.replace(before.metrics, kl_mean=around(4e-4, 1e-6))
    )
    now = release(6e-4, documents=29)
    (found, *_) = regressions(before, now, FILE)
    assert not found.paired and found.verdict in ("failed", "undecided")


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"tokens_scored": 41}, "tokens"), ({"slices": ()}, "texts")],
)
def test_another_subject_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=f"other {what} found"):
        regressions(release(4e-4), release(4e-4, **changes), FILE)
