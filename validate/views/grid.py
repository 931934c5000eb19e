"""Tables of the page: captions, scopes, numbers to the right, and what sorting goes by."""

from __future__ import annotations

from collections.abc import Sequence

from headport.validate.section import Section
from headport.validate.views.markup import Markup, element, joined

__all__ = ["data_table", "folded", "section_table"]

_VERDICTS = ("passed", "failed", "undecided")


def data_table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    **attributes: str | None,
) -> Markup:
    """A table in a frame of its own that scrolls; a caption names it.

    Args:
        caption: What it holds, in words.
        columns: Heads.
        rows: Cells, text or markup.
        attributes: Of the table.
    """
    numeric = [
        all(_number(row[at]) is not None or row[at] == "–" for row in rows)
        for at in range(len(columns))
    ]
    heads = [
        element("th", name, scope="col", class_="number" if right else None)
        for name, right in zip(columns, numeric, strict=True)
    ]
    body = [
        element("tr", *(_cell(cell, right) for cell, right in zip(row, numeric, strict=True)))
        for row in rows
    ]
    table = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *heads)),
        element("tbody", *body),
        **attributes,
    )
    # What scrolls must be reachable by keyboard.
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _cell(cell: str, numeric: bool) -> Markup:
    if isinstance(cell, Markup):
        return element("td", cell)
    if cell in _VERDICTS:
        return element("td", cell, class_=cell)
    value = _number(cell)
    return element("td", cell, class_="number" if numeric else None, data_v=value)


def _number(cell: str) -> float | None:
    if isinstance(cell, Markup):
        return None
    try:
        return float(cell.removesuffix("%").rstrip())
    except ValueError:
        return None


def section_table(
    section: Section, caption: str | None = None, *, sortable: bool = False
) -> Markup:
    """A section of the report's tables."""
    shown = section.title if caption is None else caption
    return data_table(shown, section.columns, section.rows, class_="sortable" if sortable else None)


def folded(summary: str, *children: str) -> Markup:
    """Children that a reader opens."""
    return element("details", element("summary", summary), joined(*children))
