"""How long a head takes for one row, and its bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np

from headport.validate.candidate import Candidate

__all__ = ["step_ms"]

_ROUNDS = 25


def step_ms(heads: Sequence[Candidate]) -> list[float]:
    """Median milliseconds of each head for one hidden state; taken in turns, first runs left out.

    A head that gives candidates is timed with what `Candidate.logits` asks of it.
    """
    rows = [
        np.random.default_rng(0).normal(size=(1, head.hidden_size)).astype(np.float32)
        for head in heads
    ]
    times: list[list[float]] = [[] for _ in heads]
    for turn in range(_ROUNDS + 3):
        for head, row, own in zip(heads, rows, times, strict=True):
            started = time.perf_counter()
            head.logits(row)
            if turn >= 3:
                own.append(1e3 * (time.perf_counter() - started))
    return [statistics.median(own) for own in times]
