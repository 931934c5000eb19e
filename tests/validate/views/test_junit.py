"""JUnit XML: a case per gate and slice, counts that add up, any text inside."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import msgspec

from headport.validate.report import GateResult, Regression, Report
from headport.validate.views.junit import render_junit
from tests.validate.reports import report
from tests.validate.test_renderers import HOSTILE


def gate(**changes: object) -> GateResult:
    return msgspec.structs.replace(report().gates[0], **changes)


def suite(found: Report) -> ET.Element:
    root = ET.fromstring(render_junit(found).encode())
    (inner,) = root
    return inner


def test_a_case_for_each_gate_and_slice() -> None:
    undecided = gate(slice="code", verdict="undecided", reason="too few tokens", tokens_needed=900)
    gates = (gate(), gate(slice="prose", verdict="failed"), undecided)
    worse = Regression(
        metric="kl_mean",
        margin=1e-5,
        baseline=4e-4,
        value=6e-4,
        worsening=2e-4,
        low=1e-4,
        high=3e-4,
        paired=True,
        verdict="failed",
    )
    found = suite(
        report(verdict="failed", gates=gates, regressions=(worse,), baseline="before.json")
    )
    cases = found.findall("testcase")
    assert [(c.get("classname"), c.get("name")) for c in cases] == [
        ("headport.gate.all", "kl_mean"),
        ("headport.gate.prose", "kl_mean"),
        ("headport.gate.code", "kl_mean"),
        ("headport.baseline.before.json", "kl_mean"),
        ("headport.sampler", "samplers draw the reference's tokens"),
    ]
    failures = [None if (f := c.find("failure")) is None else f.get("type") for c in cases]
    assert failures == [None, "failed", "undecided", "failed", None]
    assert (found.get("tests"), found.get("failures")) == ("5", "3")
    message = cases[2].find("failure").get("message")  # type: ignore[union-attr]
    assert message is not None and "too few tokens; about 900 tokens would decide" in message
    assert "4.000e-04, 95 % interval 3.800e-04 … 4.200e-04, limit ≤ 0.002" in message


def test_what_no_gate_tells_is_a_failure_too() -> None:
    found = suite(report(verdict="undecided", tokens_scored=0))
    (failure,) = found.findall("testcase/failure")
    assert (failure.get("type"), found.get("failures")) == ("undecided", "1")
    assert found.get("tests") == str(len(found.findall("testcase")))
    assert not suite(report()).findall("testcase/failure")


def test_any_text_keeps_the_document_well_formed() -> None:
    found = suite(report(name=HOSTILE + "\x00\ufffe", gates=(gate(slice=HOSTILE + "]]>\x00"),)))
    (name,) = [c.get("classname") for c in found.findall("testcase")][:1]
    assert name is not None and "<script>" in name and "\\x1b[2J" in name
