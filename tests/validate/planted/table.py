"""The table of planted faults: `python -m tests.validate.planted.table [--write PAGE]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.validate.planted import files, quantised, running, samplers, tokenizers
from tests.validate.planted.row import Row

__all__ = ["table", "with_table"]

BEGIN, END = "<!-- planted faults: begin -->", "<!-- planted faults: end -->"
# As they appear for users; each has a test of its own elsewhere.
_OTHERS = (("one byte of a file", "bundle", "checksums: exit 2", "the file"),)


def table() -> str:
    """All rows as Markdown."""
    head = ("fault", "where", "what fails", "named part")
    rows = (*_cells(), *_OTHERS)
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ("---",) * 4, *rows)]
    return "\n".join(lines)


def _cells() -> Iterator[tuple[str, ...]]:
    kinds = (files.ROWS, quantised.ROWS, running.ROWS, samplers.ROWS, samplers.PROCESSORS)
    for row in (row for rows in (*kinds, tokenizers.ROWS) for row in rows):
        yield row.fault, row.where, _gates(row), _part(row)


def _gates(row: Row) -> str:
    return ", ".join(sorted(f"`{g}`" if " " not in g else g for g in row.gates))


def _part(row: Row) -> str:
    return f"row of the grid with {row.part}" if row.where == "sampler" else row.part


def with_table(page: str) -> str:
    """A page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert before != page and rest != after, f"{BEGIN} and {END} expected on lines of their own"
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or write it into a page."""
    parser = argparse.ArgumentParser(prog="tests.validate.planted.table", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE")
    page: Path | None = parser.parse_args(arguments).write
    if page is None:
        print(table())
    else:
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
