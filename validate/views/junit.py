"""A report as JUnit XML: one test case per gate and slice, as pipelines show them.

Source of the format: the schema that Jenkins' xUnit plugin publishes (junit-10.xsd), of which
`testsuite`, `testcase`, `failure`, `skipped` and `properties` are used.
"""

from __future__ import annotations

from xml.etree import ElementTree as ET

from headport.validate.report import GateResult, Regression, Report
from headport.validate.tables import gate_texts, headline, visible

__all__ = ["render_junit"]


def render_junit(report: Report) -> str:
    """The gates, regressions and samplers as test cases.

    A gate that failed is a failure, and so is one that is undecided: a pipeline must not take it
    for passed. The message says which of the two.
    """
    root = ET.Element("testsuites", name="headport validate")
    suite = ET.SubElement(root, "testsuite", name=visible(report.candidate.bundle))
    properties = ET.SubElement(suite, "properties")
    for name, value in _properties(report):
        ET.SubElement(properties, "property", name=name, value=visible(value))
    texts = gate_texts(report)
    failed = sum(_gate(suite, *pair) for pair in zip(report.gates, texts, strict=True))
    failed += sum(_regression(suite, report, found) for found in report.regressions)
    if report.sampler is not None:
        verdict = report.sampler.verdict
        failed += _case(suite, "sampler", "samplers draw the reference's tokens", verdict, verdict)
    if not failed and report.verdict != "passed":  # such as every gate held, on no token
        failed += _case(suite, "verdict", "verdict", report.verdict, headline(report))
    counts = {"tests": str(len(suite) - 1), "failures": str(failed), "errors": "0"}
    for element in (root, suite):
        element.attrib |= {**counts, "time": f"{report.timing.total:.3f}"}
    suite.attrib |= {"timestamp": report.date, "skipped": "0"}
    ET.SubElement(suite, "system-out").text = headline(report)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, "unicode") + "\n"


def _properties(report: Report) -> list[tuple[str, str]]:
    return [
        ("headport", report.headport),
        ("verdict", report.verdict),
        ("reference", report.reference.checkpoint),
        ("reference_sha256", report.reference.sha256),
        ("bundle_manifest_sha256", report.candidate.manifest_sha256),
        ("target", report.candidate.target),
        ("tokens_scored", str(report.tokens_scored)),
        ("protocol", report.protocol.description),
    ]


def _gate(suite: ET.Element, gate: GateResult, text: str) -> bool:
    return _case(suite, f"gate.{gate.slice or 'all'}", gate.metric, gate.verdict, text)


def _regression(suite: ET.Element, report: Report, found: Regression) -> bool:
    text = f"{found.baseline} before, {found.value} now; worse by {found.worsening}"
    return _case(suite, f"baseline.{report.baseline}", found.metric, found.verdict, text)


def _case(suite: ET.Element, group: str, name: str, verdict: str, text: str) -> bool:
    """Add one case; True if it counts as a failure."""
    group, name, text = visible(f"headport.{group}"), visible(name), visible(text)
    case = ET.SubElement(suite, "testcase", classname=group, name=name, time="0")
    if verdict == "passed":
        ET.SubElement(case, "system-out").text = text
        return False
    message = f"{verdict}: {text}"
    ET.SubElement(case, "failure", type=verdict, message=message).text = message
    return True
