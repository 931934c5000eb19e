"""The plan of the parity run, and that its verdict can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headport.lowering.parity import HeadParity, ParityReport, plan_cases


@pytest.mark.parametrize("max_context", [1, 2, 5, 8, 24, 64, 640, 8192])
def test_cases_fit_the_context(max_context: int) -> None:
    cases = plan_cases(max_context, (0,))
    for case in cases:
        totals = [sum(row) for row in zip(*case.steps, strict=True)]
        assert max(totals) <= case.capacity <= max_context
        assert all(n >= 0 for step in case.steps for n in step)
    if max_context <= 640:  # the context's last place is used
        assert max(sum(step[0] for step in case.steps) for case in cases) == max_context


def test_cases_cover_what_goes_wrong() -> None:
    cases = {case.name: case for case in plan_cases(8192, (16,))}
    assert len({len(case.steps[0]) for case in cases.values()}) > 1  # batch sizes
    assert any(0 in step for step in cases["chunks"].steps)  # an idle row in a prefill chunk
    assert any(0 in step and max(step) == 1 for step in cases["ragged"].steps)  # and in decode
    full = cases["full cache"]
    assert sum(step[0] for step in full.steps) == full.capacity
    filling = full.steps[1]
    assert filling[0] < max(filling)  # padded over the end of the row it fills
    assert max(sum(step[0] for step in case.steps) for case in cases.values()) > 16  # past > window


def test_long_windows_are_listed_not_run() -> None:
    longest = max(sum(step[0] for step in case.steps) for case in plan_cases(8192, (0, 4096)))
    assert longest < 640


def _report() -> ParityReport:
    head = HeadParity(0.1, 0.5, "bound")
    return ParityReport({"a": 1e-6}, 2e-4, {"lm": head}, 0.1, 10, ())


def test_verdict() -> None:
    good = _report()
    assert good
    assert not replace(good, positions=0)  # nothing compared is no success
    assert not replace(good, hidden_states={"a": 3e-4})
    assert not replace(good, hidden_states={"a": float("nan")})
    assert not replace(good, heads={"lm": HeadParity(0.1, 1.1, "bound")})
    assert not replace(good, heads={"lm": HeadParity(0.1, float("inf"), "bound")})
