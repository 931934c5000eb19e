"""Progress bars for whatever takes longer than two seconds; silent with `--quiet`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

__all__ = ["bar", "set_quiet", "track"]

_T = TypeVar("_T")


class _Switch:
    quiet = False


def set_quiet(quiet: bool) -> None:
    """Switch all progress output off or on."""
    _Switch.quiet = quiet


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
