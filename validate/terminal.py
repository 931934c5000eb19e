"""A report for the terminal."""

from __future__ import annotations

import unicodedata

from headport.validate.report import Report
from headport.validate.section import Section
from headport.validate.tables import headline, report_sections

__all__ = ["render_section", "render_terminal"]

_CELL_COLUMNS = 60  # wider cells are cut in the last places of a table
# By first words; the files hold all sections, and of the figures these.
_SHOWN = (
    "Gates",
    "Against",
    "What to do",
    "Figures",
    "Where",
    "Stages",
    "Reference against",
    "Samplers",
    "Greedy runs",
    "Notes",
    "Machine and time",
)
_HIDDEN_FIGURES = ("kl_p", "kl_min", "delta_p_p", "delta_p_min", "delta_p_max", "_order")


def render_terminal(report: Report) -> str:
    """The verdict, the figures and the protocol in short; the files hold the rest."""
    parts = [headline(report)]
    parts += [
        render_section(_short(s)) for s in report_sections(report) if s.title.startswith(_SHOWN)
    ]
    parts += [f"protocol: {report.protocol.description}", headline(report)]
    return "\n\n".join(parts)


def _short(section: Section) -> Section:
    if section.title != "Figures":
        return section
    hidden = (*_HIDDEN_FIGURES, "max_abs_logit_error_p")
    rows = [r for r in section.rows if r[0] == "kl_p99" or not any(h in r[0] for h in hidden)]
    return Section(section.title, section.columns, tuple(rows))


def render_section(section: Section) -> str:
    """A table in columns; long cells are cut."""
    real = len(section.columns) > 2  # facts and notes read by themselves, uncut, without names
    rows = [
        tuple(_cut(c) for c in row) if real else row for row in (section.columns, *section.rows)
    ]
    widths = [max(_width(row[i]) for row in rows) for i in range(len(section.columns))]
    lines = [
        "  ".join(
            cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([section.title, *(f"  {line}" for line in lines[0 if real else 1 :])])


def _cut(cell: str) -> str:
    if _width(cell) <= _CELL_COLUMNS:
        return cell
    kept = 0
    width = 0
    while width + _width(cell[kept]) < _CELL_COLUMNS:
        width += _width(cell[kept])
        kept += 1
    return cell[:kept] + "…"


def _width(text: str) -> int:
    """Columns of a terminal: wide characters take two, combining ones none."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)
