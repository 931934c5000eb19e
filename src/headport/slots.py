"""Caches of sequences that come and go one by one, each in a slot of its own.

A batch's cache (`Runner.new_cache`) lives as long as its batch. A scheduler that lets requests join
and leave between steps needs rows that start, end and restart apart from each other, in memory that
is taken once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from headport.session_runner import Cache, Runner
from headport.source_encoder import RowSources

__all__ = ["SeparateSlots", "SharedSlots", "SlotRunner", "Slots", "open_slots"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


class Slots(Protocol):
    """`count` sequences of up to `capacity` tokens each."""

    @property
    def capacity(self) -> int:
        """Tokens that a slot may hold."""
        ...

    @property
    def lengths(self) -> Int64:
        """Tokens in each slot, [count]."""
        ...

    @property
    def sources(self) -> RowSources:
        """What each slot reads beside its tokens; `copy` copies that too."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all slots; 0 where the runner does not say."""
        ...

    @property
    def divisible(self) -> bool:
        """Whether the first tokens of a slot can be kept or copied without the rest."""
        ...

    @property
    def movable(self) -> bool:
        """Whether `copy` works, and rows side by side run faster than rows apart."""
        ...

    def forward(self, rows: Sequence[int], token_ids: Int64, lengths: Int64) -> Float32:
        """Append tokens to some slots; all others stay as they are.

        What a slot answers to a run of its own depends on its tokens, on how they were cut into
        runs, and on nothing else.

        Args:
            rows: Slots, ascending, [n].
            token_ids: [n, T], each row's new tokens first, anything after them.
            lengths: [n], new tokens per row, 1…T.

        Returns:
            Hidden states after the final norm, [n, T, H]; entries past a row's length are
            unspecified.
        """
        ...

    def cut(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens; any length but 0 needs `divisible`."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Make `target` hold the first `length` tokens of `source`, bit for bit.

        Needs `movable`, and `divisible` unless it is all that `source` holds.
        """
        ...


@runtime_checkable
class SlotRunner(Protocol):
    """A runner with slots of its own kind."""

    def new_slots(self, count: int, capacity: int) -> Slots:
        """Empty slots."""
        ...


def open_slots(runner: Runner, count: int, capacity: int) -> Slots:
    """Slots of a runner, of its own kind where it has one."""
    if isinstance(runner, SlotRunner):
        return runner.new_slots(count, capacity)
    return SeparateSlots(runner, count, capacity)


class SeparateSlots:
    """Slots of any runner: a cache for each, run one after the other."""

    divisible = False
    movable = False
    nbytes = 0

    def __init__(self, runner: Runner, count: int, capacity: int) -> None:
        self.capacity = capacity
        self.sources = RowSources((), count)
        self._runner = runner
        self._caches: list[Cache | None] = [None] * count

    @property
    def lengths(self) -> Int64:
        held = [0 if cache is None else int(cache.lengths[0]) for cache in self._caches]
        return np.array(held, np.int64)

    def forward(self, rows: Sequence[int], token_ids: Int64, lengths: Int64) -> Float32:
        parts = []
        for row, ids, new in zip(rows, token_ids, lengths, strict=True):
            cache = self._caches[row] or self._runner.new_cache(1, self.capacity)
            self._caches[row] = cache
            part = self._runner.forward(cache, ids[None, :new], np.array([new], np.int64))
            parts.append(np.pad(part, ((0, 0), (0, token_ids.shape[1] - int(new)), (0, 0))))
        return np.concatenate(parts)

    def cut(self, slot: int, length: int) -> None:
        if length == 0:
            self._caches[slot] = None
        assert self.lengths[slot] == length, "a cache of its own can only be dropped"

    def copy(self, source: int, target: int, length: int) -> None:
        raise NotImplementedError("caches of their own are not copied")


class SharedSlots:
    """What slots have in common that are the rows of one cache.

    Args:
        cache: Lengths and buffers of all slots.
        nbytes: Bytes of the buffers.
    """

    def __init__(self, cache: Cache, nbytes: int) -> None:
        self.nbytes = nbytes
        self.capacity = cache.capacity
        self.sources = cache.sources
        self._shared = cache

    @property
    def lengths(self) -> Int64:
        """Tokens in each slot, [count]."""
        return self._shared.lengths
