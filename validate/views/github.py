"""A report inside GitHub Actions: a summary of the step, and annotations of what did not pass.

Sources: docs.github.com, "Workflow commands for GitHub Actions": the file that
GITHUB_STEP_SUMMARY names takes Markdown, of at most 1 MiB per step; `::error title=…::message` on
stdout makes an annotation, in which %, CR and LF are escaped, in its title also colon and comma.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from headport.errors import OutputError
from headport.validate.advice import next_steps
from headport.validate.markdown import render_sections
from headport.validate.report import Report
from headport.validate.section import Section
from headport.validate.tables import gate_texts, headline, report_sections, visible

__all__ = ["append_summary", "step_summary", "workflow_commands"]

_SHOWN = ("Gates", "Against", "Notes", "Where the drift", "Machine and time")
_LEVELS = {"failed": "error", "undecided": "warning"}
_VARIABLE = "GITHUB_STEP_SUMMARY"


def step_summary(report: Report) -> str:
    """Verdict, gates and what to do next as Markdown."""
    steps = Section("What to do next", ("step",), tuple((step,) for step in next_steps(report)))
    sections = [s for s in report_sections(report) if s.title.startswith(_SHOWN)]
    return render_sections(f"Validation: {report.verdict}", headline(report), [steps, *sections])


def workflow_commands(report: Report) -> str:
    """One workflow command per gate, regression or sampler that did not pass; empty if all did."""
    lines = [
        _command(gate.verdict, f"{gate.metric} ({gate.slice or 'all texts'})", text)
        for gate, text in zip(report.gates, gate_texts(report), strict=True)
        if gate.verdict != "passed"
    ]
    lines += [
        _command(found.verdict, f"{found.metric} against {report.baseline}", "worse than before")
        for found in report.regressions
        if found.verdict != "passed"
    ]
    if report.sampler is not None and report.sampler.verdict != "passed":
        lines.append(_command(report.sampler.verdict, "samplers", "other tokens were drawn"))
    if not lines and report.verdict != "passed":
        lines.append(_command(report.verdict, "verdict", headline(report)))
    return "\n".join(lines)


def _command(verdict: str, title: str, message: str) -> str:
    level = _LEVELS[verdict]
    title = _data(f"headport {verdict}: {title}").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={title}::{_data(message)}"


def _data(text: str) -> str:
    # Line ends are spelt out by `visible` already: a text cannot begin a command of its own.
    return visible(text).replace("%", "%25")


def append_summary(report: Report, environment: Mapping[str, str] = os.environ) -> bool:
    """Append the summary to the file that GitHub Actions names; elsewhere nothing, and False.

    Raises:
        OutputError: If that file cannot be written.
    """
    name = environment.get(_VARIABLE)
    if not name:
        return False
    try:
        with Path(name).open("a", encoding="utf-8") as file:
            file.write(step_summary(report) + "\n")
    except OSError as error:
        raise OutputError(f"{_VARIABLE} names {name}, which cannot be written: {error}") from error
    return True
