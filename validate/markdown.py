"""A report as Markdown (GitHub's tables)."""

from __future__ import annotations

import re

from headport.validate.report import Report
from headport.validate.section import Section
from headport.validate.tables import headline, report_sections

__all__ = ["render_markdown"]

# Whatever could open a link, an image, HTML, code, emphasis, a formula, a mention or another
# cell; `_` inside a word opens nothing.
_ACTIVE = re.compile(r"[\\`*\[\]<>#|~$@&]|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.")


def render_markdown(report: Report) -> str:
    """The whole report; nothing in a text or name can become markup."""
    parts = [f"# Validation: {_escape(report.verdict)}", _escape(headline(report))]
    parts += [_table(section) for section in report_sections(report)]
    return "\n\n".join(parts) + "\n"


def _escape(text: str) -> str:
    return _ACTIVE.sub(lambda found: f"&#{ord(found[0])};", text)


def _table(section: Section) -> str:
    lines = [
        f"## {_escape(section.title)}",
        "",
        _row(section.columns),
        "| " + " | ".join("---" for _ in section.columns) + " |",
        *(_row(row) for row in section.rows),
    ]
    return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(_escape(cell) for cell in cells) + " |"
