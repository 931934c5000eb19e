"""Tables as one self-contained HTML page: no script, no network."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from headport.validate.section import Section

__all__ = ["render_sections"]

_STYLE = """
:root { color-scheme: light dark; --line: #d0d4da; --soft: #f4f6f8;
  --passed: #1a7f37; --failed: #cf222e; --undecided: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --line: #3b424b; --soft: #1b2027;
  --passed: #3fb950; --failed: #ff7b72; --undecided: #d29922; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .8rem .3rem 0; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; background: var(--soft); white-space: nowrap; }
td.number { text-align: right; white-space: nowrap; }
.passed { color: var(--passed); font-weight: 600; }
.failed { color: var(--failed); font-weight: 600; }
.undecided { color: var(--undecided); font-weight: 600; }
"""
_VERDICTS = ("passed", "failed", "undecided")
# The page loads nothing and runs nothing, even if a text should slip through the escaping.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_sections(
    title: str, lead: str, sections: Iterable[Section], verdict: str | None = None
) -> str:
    """A page of tables under a title and a sentence; nothing in them can become markup."""
    named = escape(title) if verdict is None else f"{escape(title)}: {escape(verdict)}"
    shown = named
    if verdict is not None:
        shown = f'{escape(title)}: <span class="{escape(verdict)}">{escape(verdict)}</span>'
    tables = "\n".join(_section(section) for section in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{named}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{shown}</h1>
<p>{escape(lead)}</p>
{tables}
</body>
</html>
"""


def _section(section: Section) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in section.columns)
    body = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in section.rows)
    return (
        f'<h2>{escape(section.title)}</h2>\n<div class="scroll"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _cell(cell: str) -> str:
    # Class names come from a fixed list, never from a cell.
    if cell in _VERDICTS:
        return f'<td class="{cell}">{cell}</td>'
    style = ' class="number"' if _is_number(cell) else ""
    return f"<td{style}>{escape(cell)}</td>"


def _is_number(cell: str) -> bool:
    try:
        float(cell.removesuffix("%"))
    except ValueError:
        return cell == "–"
    return True
