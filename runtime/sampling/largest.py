"""The largest values of a row in order, without sorting all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["largest"]

Int64 = npt.NDArray[np.int64]


def largest(values: npt.NDArray[Any], count: int) -> Int64:
    """Positions of the largest values above -inf, largest first, ties by lowest position."""
    count = min(count, int(np.isfinite(values).sum()))
    if count == 0:
        return np.zeros(0, np.int64)
    least = np.partition(values, len(values) - count)[len(values) - count]
    among = np.flatnonzero(values >= least)
    order: Int64 = among[np.argsort(-values[among], kind="stable")][:count]
    return order
