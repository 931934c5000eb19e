"""What a pass found and did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Match", "summarize"]


@dataclass(frozen=True)
class Match:
    """One place a pass looked at; `became` is None where it stayed portable, for `reason`."""

    where: str  # a layer or a head, as a reader knows it
    was: str  # operator or pattern found
    became: str | None
    reason: str = ""


def summarize(matches: Iterable[Match]) -> tuple[dict[str, int], list[str]]:
    """Counts of what was lowered, and a line for each thing that stayed portable."""
    found = list(matches)
    lowered = Counter(f"{m.was} → {m.became}" for m in found if m.became is not None)
    stayed = [f"{m.where}: {m.was} ({m.reason})" for m in found if m.became is None]
    return dict(lowered), stayed
