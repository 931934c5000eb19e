"""A report as Markdown (GitHub's tables)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from headport.validate.report import Report
from headport.validate.section import Section
from headport.validate.tables import headline, report_sections

__all__ = ["render_markdown", "render_sections"]

# Whatever could open a link, an image, HTML, code, emphasis, a formula, a mention or another
# cell; `_` inside a word opens nothing.
_ACTIVE = re.compile(r"[\\`*\[\]<>#|~$@&]|(?<!\w)_|_(?!\w)|:(?=//)|(?<=www)\.")


def render_markdown(report: Report) -> str:
    """The whole report; nothing in a text or name can become markup."""
    title = f"Validation: {report.verdict}"
    return render_sections(title, headline(report), report_sections(report))


def render_sections(title: str, lead: str, sections: Iterable[Section]) -> str:
    """Tables under a title and a sentence; nothing in them can become markup."""
    parts = [f"# {_escape(title)}", _escape(lead), *(_table(section) for section in sections)]
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
