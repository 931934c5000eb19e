"""Progress bars for whatever takes longer than two seconds; silent with `--quiet`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

__all__ = ["bar", "say", "set_quiet", "track"]

_T = TypeVar("_T")


class _Switch:
    quiet = False
    json_on_stdout = False


def set_quiet(quiet: bool, *, json_on_stdout: bool = False) -> None:
    """Switch progress off or on; with JSON on stdout, `say` keeps stdout free."""
    _Switch.quiet = quiet
    _Switch.json_on_stdout = json_on_stdout


def say(text: str, end: str = "\n") -> None:
    """Print while a verb runs, such as streamed text: on stdout unless JSON goes there."""
    if not _Switch.quiet:
        print(text, end=end, flush=True, file=sys.stderr if _Switch.json_on_stdout else sys.stdout)


def _disabled() -> bool | None:
    return True if _Switch.quiet else None  # None: off where stderr is not a terminal


def bar(total: int | None, what: str, unit: str = "it") -> tqdm[Any]:
    """A bar to update by hand; appears on stderr after two seconds."""
    return tqdm(total=total, desc=what, unit=unit, delay=2, disable=_disabled(), file=sys.stderr)


def track(
    items: Iterable[_T], what: str, total: int | None = None, unit: str = "it"
) -> Iterable[_T]:
    """Iterate with a bar that appears on stderr after two seconds."""
    return tqdm(
        items, desc=what, total=total, unit=unit, delay=2, disable=_disabled(), file=sys.stderr
    )
