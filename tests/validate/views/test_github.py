"""Workflow commands: nothing in a text can end a command or begin another."""

from __future__ import annotations

import msgspec

from headport.validate.views.github import append_summary, step_summary, workflow_commands
from tests.validate.reports import report


def test_hostile_names_stay_in_their_annotation() -> None:
    gate = msgspec.structs.replace(
        report().gates[0],
        slice="a\n::set-env name=X::y,b:c 100%",
        verdict="undecided",
        reason="because\r\n::error::no",
    )
    (line,) = workflow_commands(report(gates=(gate,))).splitlines()
    title, message = line.removeprefix("::warning title=").split("::", 1)
    assert title == (
        "headport undecided%3A kl_mean (a\\n%3A%3Aset-env name=X%3A%3Ay%2Cb%3Ac 100%25)"
    )
    assert "because\\r\\n::error::no" in message


def test_a_passed_report_has_no_annotation_but_a_summary() -> None:
    assert workflow_commands(report()) == ""
    assert "Keep report.json beside it" in step_summary(report())


def test_a_sampler_and_a_verdict_without_a_cause_are_annotated() -> None:
    found = report().sampler
    assert found is not None
    failed = msgspec.structs.replace(found, verdict="failed")
    (line,) = workflow_commands(report(verdict="failed", sampler=failed)).splitlines()
    assert line.startswith("::error title=headport failed%3A samplers::")
    (line,) = workflow_commands(report(verdict="undecided", tokens_scored=0)).splitlines()
    assert line.startswith("::warning title=headport undecided%3A verdict::UNDECIDED")


def test_elsewhere_nothing_is_written() -> None:
    assert not append_summary(report(), {})
