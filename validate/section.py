"""A table of a report: the one form that every renderer lays out."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Section"]


@dataclass(frozen=True)
class Section:
    """A title, columns, and rows of as many cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
