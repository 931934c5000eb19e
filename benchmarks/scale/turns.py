"""Taking turns: whatever the machine does meanwhile meets all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from benchmarks.peers.child import Child, Variant

__all__ = ["DROPPED", "NOISE", "in_turns", "open_child"]

NOISE = 1.12  # what two processes of the same bundle differ by
DROPPED = 2  # steps at the start of a turn, which find caches and threads cold


def open_child(bundle: Path | str, threads: int, option: str = "") -> Child:
    """A process that has loaded a bundle; see `benchmarks.peers.children.bundle_slots`."""
    variant = Variant(str(bundle), "bundle_slots.py", Path(bundle))
    return Child(variant, threads, option)


def in_turns(
    actions: Mapping[str, Callable[[], list[float]]], rounds: int
) -> dict[str, list[float]]:
    """Median of what each action says in each round, in random order within a round."""
    order = np.random.default_rng(0)
    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name in order.permutation(list(actions)).tolist():
            found[name].append(float(np.median(actions[name]()[DROPPED:])))
    return found
