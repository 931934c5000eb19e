"""Slots of a portable backbone: kept compact, and handed to each run as padded copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.cache_ports import is_state, present_name
from headport.source_encoder import RowSources

__all__ = ["PortableSlots"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


class PortableSlots:
    """See `headport.slots.Slots`.

    The graph returns its caches grown by concatenation, so a step reads and writes all that its
    rows hold. Lower the bundle where that matters.

    Args:
        buffers: Cache input → [count, KV, prefix + capacity, D], zeros behind the prefix, or zeros
            of any shape for a state.
        sources: What each slot reads beside its tokens.
        capacity: Tokens per slot.
        prefix: First places of each slot, which hold what every sequence begins with.
        run: Runs the backbone once.
    """

    movable = True

    def __init__(
        self,
        buffers: dict[str, Array],
        sources: RowSources,
        capacity: int,
        prefix: int,
        run: Callable[[dict[str, Array]], dict[str, Array]],
    ) -> None:
        self.capacity = capacity
        self.sources = sources
        self.lengths: Int64 = np.zeros(sources.count, np.int64)
        self.nbytes = sum(buffer.nbytes for buffer in buffers.values())
        self.divisible = not any(is_state(name) for name in buffers)
        self._buffers = buffers
        self._prefix = prefix
        self._run = run

    def forward(self, rows: Sequence[int], token_ids: Int64, lengths: Int64) -> Float32:
        chosen = np.asarray(rows, np.int64)
        held = self._prefix + self.lengths[chosen]
        longest, width = int(held.max()), token_ids.shape[1]
        valid = np.arange(width)[None, :] < lengths[:, None]
        past = np.arange(longest)[None, :] < held[:, None]
        feeds: dict[str, Array] = {
            "input_ids": np.where(valid, token_ids, 0),
            "attention_mask": np.concatenate([past, valid], axis=1).astype(np.int64),
        }
        feeds |= self.sources.feeds(rows)
        for name, buffer in self._buffers.items():
            feeds[name] = buffer[chosen] if is_state(name) else buffer[chosen, :, :longest]
        found = self._run(feeds)
        for name, buffer in self._buffers.items():
            grown = found[present_name(name)]
            if is_state(name):
                buffer[chosen] = grown
                continue
            for n, row in enumerate(rows):
                new = grown[n, :, longest : longest + int(lengths[n])]
                buffer[row, :, held[n] : held[n] + int(lengths[n])] = new
        self.lengths[chosen] += lengths
        return found["hidden_states"].astype(np.float32, copy=False)

    def cut(self, slot: int, length: int) -> None:
        assert length in (0, self.lengths[slot]) or self.divisible
        first, end = self._prefix + length, self._prefix + int(self.lengths[slot])
        for name, buffer in self._buffers.items():
            # What stands behind a row's tokens is read, with weight 0: it must be finite.
            if not is_state(name):
                buffer[slot, :, first:end] = 0
            elif length == 0:
                buffer[slot] = 0
        self.lengths[slot] = length

    def copy(self, source: int, target: int, length: int) -> None:
        assert length == self.lengths[source] or self.divisible
        self.cut(target, 0)
        self.sources.copy(source, target)
        end = self._prefix + length
        for name, buffer in self._buffers.items():
            if is_state(name):
                buffer[target] = buffer[source]
            else:
                buffer[target, :, :end] = buffer[source, :, :end]
        self.lengths[target] = length
