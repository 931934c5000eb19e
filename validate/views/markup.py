"""HTML and SVG as a value: what is not markup already is escaped when it goes in."""

from __future__ import annotations

from html import escape

from headport.validate.tables import visible

__all__ = ["Markup", "element", "joined", "page_text"]

_VOID = ("meta", "input")


class Markup(str):
    """Text that is markup: made by `element`, `joined` or written in this package."""

    __slots__ = ()


def page_text(text: str) -> Markup:
    """Text as markup: control, invisible and bidirectional characters spelt out, then escaped."""
    return text if isinstance(text, Markup) else Markup(escape(visible(text)))


def element(tag: str, *children: str, **attributes: str | float | bool | None) -> Markup:
    """One element.

    Args:
        tag: Its name, ours.
        children: Markup as it is, all other text escaped.
        attributes: Name → value; `class_` is class and `data_x` is data-x. None and False leave
            one out, True has no value.
    """
    shown = "".join(
        f" {_name(key)}" + ("" if value is True else f'="{page_text(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in _VOID:
        return Markup(f"<{tag}{shown}>")
    return Markup(f"<{tag}{shown}>{joined(*children)}</{tag}>")


def joined(*children: str) -> Markup:
    """Children one after the other."""
    return Markup("".join(page_text(child) for child in children))


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
