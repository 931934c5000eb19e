"""Faults of a runtime, planted in how a good bundle is run."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.validate.planted.files import ALL
from tests.validate.planted.row import Row

__all__ = ["ROWS"]


def _padded(run: Any) -> Any:
    """Left padding that nothing masks."""

    def hidden_states(windows: Any, _sources: Any) -> Any:
        pads = np.zeros(3, np.int64)
        return [states[3:] for states in run([np.append(pads, ids) for ids in windows])]

    return hidden_states


def _stale(run: Any) -> Any:
    """The cache of another prompt was not cleared."""

    def hidden_states(windows: Any, _sources: Any) -> Any:
        left = np.array([9, 40, 7, 8, 100])
        return [states[5:] for states in run([np.append(left, ids) for ids in windows])]

    return hidden_states


def _shifted(run: Any) -> Any:
    """Every answer stands one position late: labels and logits are shifted twice."""
    return lambda windows, _sources: [np.roll(states, 1, axis=0) for states in run(windows)]


def _chunked(run: Any) -> Any:
    """The second half of a window starts without the first half's cache."""

    def hidden_states(windows: Any, _sources: Any) -> Any:
        halves = [(ids[: len(ids) // 2], ids[len(ids) // 2 :]) for ids in windows]
        return [np.concatenate(run(list(pair))) for pair in halves]

    return hidden_states


def _last_only(run: Any) -> Any:
    """One hidden state is handed to every position."""
    return lambda windows, _sources: [
        np.repeat(states[-1:], len(states), 0) for states in run(windows)
    ]


def _half(run: Any) -> Any:
    """States pass through fp16 with a scale that overflows and is clamped."""

    def hidden_states(windows: Any, _sources: Any) -> Any:
        return [np.clip(states * 2.0**15, -65504, 65504) / 2.0**15 for states in run(windows)]

    return hidden_states


def _row(fault: str, plant: Any) -> Row:
    return Row(fault, "how the bundle is run", plant, frozenset(ALL), "backbone")


ROWS = (
    _row("padding on the wrong side", _padded),
    _row("stale cache", _stale),
    _row("labels shifted", _shifted),
    _row("chunks without their past", _chunked),
    _row("last position everywhere", _last_only),
    _row("fp16 overflow in the states", _half),
)
