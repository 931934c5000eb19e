"""The page shows the rows that are tested."""

from __future__ import annotations

from pathlib import Path

from tests.validate.planted.table import table, with_table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "validate.md"


def test_the_page_shows_these_rows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), (
        "run `python -m tests.validate.planted.table --write docs/validate.md`"
    )


def test_there_are_at_least_25() -> None:
    assert len(table().splitlines()) - 2 >= 25
