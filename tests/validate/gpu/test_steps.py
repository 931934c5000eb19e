"""The table of steps: what is skipped, what needs another, what breaks, what is proved."""

from __future__ import annotations

from typing import Any

import pytest

from headport.errors import BundleError, UsageError
from headport.validate.gpu.report import StepRecord, decide
from headport.validate.gpu.steps import Context, Finding, Step, Unproven, run_steps


def _context() -> Context:
    return Context(options=None, bundle=None, settings=None)


def _gives(status: Any, text: str = "") -> Any:
    return lambda context: Finding(status, text)


def _raises(error: Exception) -> Any:
    def step(context: Context) -> Finding:
        raise error

    return step


def _statuses(*steps: Step, skip: tuple[str, ...] = ()) -> dict[str, str]:
    return {record.name: record.status for record in run_steps(steps, _context(), skip)}


def test_steps_that_break_do_not_end_the_table() -> None:
    steps = (
        Step("a", "", _gives("proved")),
        Step("b", "", _raises(BundleError("a bundle's fault"))),
        Step("c", "", _raises(RuntimeError("CUDA error 700\nmore"))),
        Step("d", "", _raises(Unproven("no card"))),
        Step("e", "", _raises(ValueError())),
        Step("f", "", _gives("measured", "3 ms")),
    )
    records = {record.name: record for record in run_steps(steps, _context(), ())}
    assert [record.status for record in records.values()] == [
        *("proved", "failed", "failed", "unproven", "failed", "measured"),
    ]
    assert records["b"].text == "a bundle's fault"
    assert records["c"].text == "RuntimeError: CUDA error 700"
    assert (records["d"].text, records["e"].text) == ("no card", "ValueError: ValueError")


def test_a_step_that_needs_another() -> None:
    steps = (
        Step("driver", "", _gives("measured")),
        Step("provider", "", _raises(UsageError("no library")), ("driver",)),
        Step("selftest", "", _gives("proved"), ("provider",)),
    )
    assert _statuses(*steps) == {
        "driver": "measured",
        "provider": "failed",
        "selftest": "unproven",
    }
    assert _statuses(*steps, skip=("provider",))["selftest"] == "unproven"
    assert _statuses(*steps, skip=("driver",))["provider"] == "unproven"


def test_skipped_steps_are_not_run() -> None:
    ran: list[str] = []

    def step(context: Context) -> Finding:
        ran.append("a")
        return Finding("proved", "")

    [record] = run_steps((Step("a", "", step),), _context(), ("a",))
    assert (record.status, record.text, ran) == ("unproven", "left out by --skip", [])
    with pytest.raises(UsageError, match=r"--skip b, c: steps are a"):
        run_steps((Step("a", "", step),), _context(), ("c", "a", "b"))
    assert not ran


def test_records_are_handed_out_after_each_step() -> None:
    steps = (Step("a", "", _gives("proved")), Step("b", "", _gives("failed")))
    seen: list[int] = []
    run_steps(steps, _context(), (), lambda records: seen.append(len(records)))
    assert seen == [1, 2]


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        ((), "unproven"),
        (("unproven", "unproven"), "unproven"),
        (("measured", "unproven"), "unproven"),  # figures alone prove nothing
        (("measured", "proved", "unproven"), "passed"),
        (("proved", "failed"), "failed"),
        (("failed", "unproven"), "failed"),
    ],
)
def test_verdict(statuses: tuple[Any, ...], verdict: str) -> None:
    records = [StepRecord(name=str(i), status=s, text="") for i, s in enumerate(statuses)]
    assert decide(records) == verdict
