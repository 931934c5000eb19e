"""Arrays of zeros that take memory page by page, as they are written."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["lazy_zeros"]


def lazy_zeros(shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros of a shape, of which only the pages that are written take memory.

    `numpy.zeros` asks Linux for huge pages: a cache with room for a whole context then takes two
    megabytes for the first token of every head. Small pages take what the tokens do. Where the
    system has no such choice, this is `numpy.zeros`.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if size == 0 or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, kind)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, kind).reshape(shape)
