"""The positions with the largest KL: text, both choices, both top-10 lists."""

from __future__ import annotations

from itertools import zip_longest

from headport.validate.report import Choice, Position, Report
from headport.validate.views.grid import data_table, folded
from headport.validate.views.markup import Markup, element, joined

__all__ = ["worst_positions"]

_TABLE = "worst-table"


def worst_positions(report: Report) -> Markup:
    """A table that can be filtered and sorted."""
    if not report.worst:
        return element("p", "The two sides agree everywhere: no position has a KL above zero.")
    return joined(
        element(
            "p",
            f"The {len(report.worst)} positions with the largest KL. The marked token is the one "
            "that follows in the text; the margin is how far the reference's own choice lies "
            "above the candidate's in the reference's logits.",
            class_="soft",
        ),
        _tools(report),
        _table(report),
    )


def _tools(report: Report) -> Markup:
    names = list(dict.fromkeys(found.slice for found in report.worst))
    options = [element("option", "all texts", value="")]
    options += [element("option", name, value=name) for name in names]
    return element(
        "div",
        element("label", "Filter by words ", element("input", type="search", size=24)),
        element("label", "Text ", element("select", *options)),
        element("output", aria_live="polite", class_="soft"),
        class_="tools",
        data_table=_TABLE,
        hidden=True,
    )


def _table(report: Report) -> Markup:
    columns = ("KL", "text", "place", "context", "reference", "candidate", "margin")
    rows = [_row(found) for found in report.worst]
    caption = "Positions with the largest KL"
    return data_table(caption, columns, rows, class_="sortable", id=_TABLE)


def _row(found: Position) -> tuple[str, ...]:
    context = joined(
        element("bdi", found.context),
        element("mark", _token(found.target)),
    )
    if found.reference_top:
        context = joined(context, folded("ten likeliest tokens of both sides", _lists(found)))
    return (
        f"{found.kl:.3e}",
        found.slice,
        f"{found.document}:{found.token}",
        context,
        _choice(found.reference_top1, found.reference_top),
        _choice(found.candidate_top1, found.candidate_top),
        f"{found.reference_margin:.3e}",
    )


def _token(text: str) -> Markup:
    return element("bdi", text, class_="token")


def _choice(text: str, top: tuple[Choice, ...]) -> Markup:
    return joined(_token(text), f" {top[0].probability:.1%}" if top else "")


def _lists(found: Position) -> Markup:
    places = {choice.token_id: place for place, choice in enumerate(found.candidate_top, start=1)}
    rows = []
    both = zip_longest(found.reference_top, found.candidate_top)
    for rank, (ours, theirs) in enumerate(both, start=1):
        place = "" if ours is None else str(places.get(ours.token_id, "none"))
        rows.append((str(rank), *_cells(ours), place, *_cells(theirs)))
    columns = ("rank", "reference", "p", "place there", "candidate", "p ")
    return data_table(
        "Place there: of the reference's token in the candidate's list", columns, rows
    )


def _cells(choice: Choice | None) -> tuple[str, str]:
    if choice is None:
        return "", ""
    return _token(choice.token), f"{choice.probability:.3%}"
