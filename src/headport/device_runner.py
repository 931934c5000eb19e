"""The runner of `ort-cuda`: caches stay on the device, and only ids and hidden states travel.

ONNX Runtime's CUDA kernel takes three kinds of step, so a step of ours becomes one or more of them:

    prompt   all rows empty, also of a learnt prefix, right-padded, any lengths: one run
    decode   one token for every row: one run. A row that has none gets one it does not keep: its
             slot lies behind the row's tokens and is overwritten by the next one
    rows     anything else, such as a chunk behind others: one run for each row that has tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.device_slots import DeviceSlots
from headport.session import Binding, DeviceArray, SessionSettings
from headport.session_runner import Cache, SessionRunner, check_step
from headport.source_encoder import RowSources

__all__ = ["DeviceRunner"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

_NO_RECORDING = -1


class _DeviceCache:
    """Preallocated keys and values where the session computes.

    The first `prefix` slots of each row hold what every row begins with.
    """

    def __init__(
        self, batch_size: int, capacity: int, buffers: dict[str, DeviceArray], prefix: int
    ) -> None:
        self.capacity = capacity
        self.sources = RowSources((), batch_size)
        self.lengths: Int64 = np.zeros(batch_size, np.int64)
        self.prefix = prefix
        self.slots = _slots(prefix + capacity)
        self.buffers = buffers
        self.decode: _Step | None = None
        self.recording = _NO_RECORDING  # number of the recorded decode step

    def reorder(self, source_rows: Int64) -> None:
        """See `headport.session_runner.Cache`.

        By way of main memory: ONNX Runtime's Python interface has no copy within a device.
        """
        for buffer in self.buffers.values():
            buffer.fill(buffer.numpy()[source_rows])
        self.lengths = self.lengths[source_rows]


def _slots(capacity: int) -> int:
    return capacity + 1  # a full row that waits while others decode needs one more


@dataclass(frozen=True)
class _Step:
    """Buffers of one run of B rows and T columns, bound."""

    binding: Binding
    inputs: dict[str, DeviceArray]  # input_ids, position_ids [B, T]; seqlens_k [B]
    total: Array  # int32 scalar, which the kernel reads in main memory
    hidden: DeviceArray  # [B, T, H]


class DeviceRunner(SessionRunner):
    """Runs `ort-cuda`, on the provider of the settings."""

    def __init__(
        self, bundle: Bundle, settings: SessionSettings, heads: tuple[str, ...] | None
    ) -> None:
        super().__init__(bundle, settings, heads)
        self._capture = settings.capture and self._backbone.device != "cpu"
        self._recordings = 0

    def new_cache(self, batch_size: int, capacity: int) -> _DeviceCache:
        first = self._prefix.tokens
        buffers = {
            p.name: self._backbone.array(
                self._prefix.fill(
                    p.name,
                    np.zeros(
                        self._cache_shape(p.shape, batch_size, _slots(first + capacity)),
                        self._backbone.dtype(p.name),
                    ),
                )
            )
            for p in self._past
        }
        return _DeviceCache(batch_size, capacity, buffers, first)

    def new_slots(self, count: int, capacity: int) -> DeviceSlots:
        """Slots for sequences that come and go; see `headport.slots`."""
        cache = self.new_cache(count, capacity)
        nbytes = sum(int(np.prod(b.shape)) * b.dtype.itemsize for b in cache.buffers.values())
        return DeviceSlots(cache, nbytes, partial(self._decode, cache), partial(self._row, cache))

    def forward(self, cache: Cache, token_ids: Int64, lengths: Int64) -> Float32:
        assert isinstance(cache, _DeviceCache)
        check_step(cache, token_ids, lengths)
        batch, given = token_ids.shape
        width = int(lengths.max(initial=0))
        hidden = np.zeros((batch, given, self._hidden_size), np.float32)
        if width == 0:
            return hidden
        ids = np.where(np.arange(width)[None, :] < lengths[:, None], token_ids[:, :width], 0)
        if not cache.prefix and not cache.lengths.any():
            hidden[:, :width] = self._prompt(cache, ids, lengths)
        elif width == 1:
            hidden[:, :1] = self._decode(cache, ids, lengths)
        else:
            for row in np.flatnonzero(lengths):
                new = int(lengths[row])
                hidden[row, :new] = self._row(cache, int(row), ids[row : row + 1, :new])
        cache.lengths = cache.lengths + lengths
        return hidden

    def _prompt(self, cache: _DeviceCache, ids: Int64, lengths: Int64) -> Array:
        batch, width = ids.shape
        step = self._bind(cache.buffers, batch, width)
        last = np.maximum(lengths, 1) - 1  # a row must name a token, also where it has none
        positions = np.minimum(np.arange(width)[None, :], last[:, None])
        return self._run(step, ids, positions, last, width)

    def _decode(self, cache: _DeviceCache, ids: Int64, lengths: Int64) -> Array:
        if cache.decode is None:
            cache.decode = self._bind(cache.buffers, len(ids), 1)
            cache.recording, self._recordings = self._recordings, self._recordings + 1
        held = cache.prefix + cache.lengths
        # The token of a row that waits takes the position of the last one kept: every model has it.
        positions = np.where(lengths == 1, held, np.maximum(held, 1) - 1)[:, None]
        longest = int(held.max()) + 1
        if not self._capture:
            return self._run(cache.decode, ids, positions, held, longest)
        # What a recording read in main memory stays as it was, so it must hold for every step.
        recording = cache.recording
        return self._run(cache.decode, ids, positions, held, cache.slots, recording=recording)

    def _row(self, cache: _DeviceCache, row: int, ids: Int64) -> Array:
        held, new = cache.prefix + int(cache.lengths[row]), ids.shape[1]
        part = {name: buffer.row(row) for name, buffer in cache.buffers.items()}
        step = self._bind(part, 1, new)
        positions = held + np.arange(new)[None, :]
        found: Array = self._run(step, ids, positions, np.array([held + new - 1]), held + new)[0]
        return found

    def _bind(self, caches: dict[str, Any], batch: int, width: int) -> _Step:
        array = self._backbone.array
        inputs = {
            "input_ids": array(np.zeros((batch, width), np.int64)),
            "position_ids": array(np.zeros((batch, width), np.int64)),
            "seqlens_k": array(np.zeros(batch, np.int32)),
        }
        total = np.array(0, np.int32)
        shape = (batch, width, self._hidden_size)
        hidden = array(np.zeros(shape, self._backbone.dtype("hidden_states")))
        binding = self._backbone.bind()
        for name in self._backbone.inputs:
            if name == "total_sequence_length":
                binding.input(name, total)
            else:
                binding.input(name, inputs[name] if name in inputs else caches[name])
        binding.output("hidden_states", hidden)
        for past, present in zip(self._past, self._present, strict=True):
            binding.output(present, caches[past.name])
        return _Step(binding, inputs, total, hidden)

    def _run(
        self,
        step: _Step,
        ids: Int64,
        positions: Int64,
        last: Int64,
        total: int,
        *,
        recording: int = _NO_RECORDING,
    ) -> Array:
        values: dict[str, Array] = {
            "input_ids": ids,
            "position_ids": positions,
            "seqlens_k": last.astype(np.int32),
        }
        for name, buffer in step.inputs.items():
            buffer.fill(values[name])
        step.total[...] = total
        step.binding.run(recording if self._capture else None)
        self.runs += 1
        return step.hidden.numpy()
