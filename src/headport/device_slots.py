"""Slots of `ort-cuda`: caches on the device, in which rows stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.session_runner import Cache
from headport.slots import SharedSlots

__all__ = ["DeviceSlots"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


class DeviceSlots(SharedSlots):
    """See `headport.slots.Slots`.

    A step by one token runs all slots, of which the kernel waits for the idle ones; more tokens at
    once, such as a piece of a prompt, run row by row.

    Args:
        cache: Of all slots.
        nbytes: Bytes of its buffers.
        decode: Ids [count, 1] and new tokens [count], 0 or 1 → hidden states [count, 1, H].
        append: Row and its ids [1, T] → hidden states [T, H].
    """

    divisible = True
    movable = False

    def __init__(
        self,
        cache: Cache,
        nbytes: int,
        decode: Callable[[Int64, Int64], Array],
        append: Callable[[int, Int64], Array],
    ) -> None:
        super().__init__(cache, nbytes)
        self._decode = decode
        self._append = append

    def forward(self, rows: Sequence[int], token_ids: Int64, lengths: Int64) -> Float32:
        chosen, width = np.asarray(rows, np.int64), token_ids.shape[1]
        if width == 1:
            ids = np.zeros((len(self.lengths), 1), np.int64)
            new = np.zeros(len(self.lengths), np.int64)
            ids[chosen], new[chosen] = token_ids, lengths
            hidden = self._decode(ids, new)[chosen].astype(np.float32, copy=False)
        else:
            parts = []
            for row, each, count in zip(rows, token_ids, lengths, strict=True):
                part = self._append(row, each[None, :count])
                parts.append(np.pad(part, ((0, width - int(count)), (0, 0))))
            hidden = np.stack(parts).astype(np.float32, copy=False)
        self.lengths[chosen] += lengths
        return hidden

    def cut(self, slot: int, length: int) -> None:
        # What stands behind a row's tokens is never read.
        self.lengths[slot] = length

    def copy(self, source: int, target: int, length: int) -> None:
        raise NotImplementedError("rows on a device are not copied")
