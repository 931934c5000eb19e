"""Slots of `ort-cpu`: caches that the graph writes in place, run in ranges of neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headport.cache_ports import is_state
from headport.session_runner import Cache
from headport.slots import SharedSlots

__all__ = ["InPlaceCache", "InPlaceSlots"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
# First row, ids [n, T], new tokens [n] → hidden states [n, T, H] of rows first … first + n - 1.
Step = Callable[[int, Int64, Int64], Float32]


class InPlaceCache(Cache, Protocol):
    """A cache of fixed buffers."""

    @property
    def prefix(self) -> int:
        """First places of each slot, which hold what every sequence begins with."""
        ...

    @property
    def buffers(self) -> Mapping[str, Array]:
        """Cache input → what the next step reads, [count, KV, slots, D], or a state."""
        ...


class InPlaceSlots(SharedSlots):
    """See `headport.slots.Slots`.

    Neighbouring rows of the buffers are one array themselves, so a run covers the range from its
    first to its last row; rows between them that have nothing to do idle, and cost a product each.

    Args:
        cache: Lengths and buffers of all slots.
        nbytes: Bytes of the buffers.
        step: Runs a range of rows.
    """

    movable = True

    def __init__(self, cache: InPlaceCache, nbytes: int, step: Step) -> None:
        super().__init__(cache, nbytes)
        self._cache = cache
        self._step = step
        self.divisible = not any(is_state(name) for name in cache.buffers)

    def forward(self, rows: Sequence[int], token_ids: Int64, lengths: Int64) -> Float32:
        first, count = rows[0], rows[-1] - rows[0] + 1
        if count == len(rows):
            return self._step(first, token_ids, lengths)
        places = np.asarray(rows, np.int64) - first
        ids = np.zeros((count, token_ids.shape[1]), np.int64)
        new = np.zeros(count, np.int64)
        ids[places], new[places] = token_ids, lengths
        return self._step(first, ids, new)[places]

    def cut(self, slot: int, length: int) -> None:
        assert length in (0, self.lengths[slot]) or self.divisible
        if length == 0:
            for name, buffer in self._cache.buffers.items():
                if is_state(name):  # keys and values behind the tokens are never read
                    buffer[slot] = 0
        self.lengths[slot] = length

    def copy(self, source: int, target: int, length: int) -> None:
        assert length == self.lengths[source] or self.divisible
        self.sources.copy(source, target)
        end = self._cache.prefix + length
        for name, buffer in self._cache.buffers.items():
            if is_state(name):
                buffer[target] = buffer[source]
            else:
                buffer[target, :, :end] = buffer[source, :, :end]
        self.lengths[target] = length
