"""Buffers that stay where a session reads and writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.errors import RunError

__all__ = ["Binding", "DeviceArray", "DeviceRow", "run_error"]

Array = npt.NDArray[Any]


def run_error(file: str, error: Exception) -> RunError:
    """What ONNX Runtime, which has no common error class, says of a run, with the graph's file."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return RunError(f"{file}: ONNX Runtime failed while it ran the graph: {first}")


class DeviceArray:
    """An array where a session computes: on the GPU, or in main memory for the CPU provider."""

    def __init__(self, ort: Any, device: str, initial: Array) -> None:
        self.shape: tuple[int, ...] = initial.shape
        self.dtype = initial.dtype
        self._ort = ort
        self.device = device
        contiguous = np.ascontiguousarray(initial)
        # On the CPU the value shares the array's memory, so it must be an array of its own.
        self.value = ort.OrtValue.ortvalue_from_numpy(
            contiguous.copy() if device == "cpu" else contiguous, device, 0
        )

    def fill(self, array: Array) -> None:
        """Copy an array of the same shape into it."""
        assert array.shape == self.shape and array.dtype == self.dtype
        self.value.update_inplace(np.ascontiguousarray(array))

    def numpy(self) -> Array:
        """A copy in main memory."""
        found: Array = self.value.numpy()
        return found.copy() if self.device == "cpu" else found

    def row(self, index: int) -> DeviceRow:
        """Its part at `index` of the first axis, which is kept with length 1."""
        width = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        return DeviceRow(self, (1, *self.shape[1:]), self.value.data_ptr() + index * width)


@dataclass(frozen=True)
class DeviceRow:
    """One row of a `DeviceArray`; writes go through to it."""

    owner: DeviceArray
    shape: tuple[int, ...]
    address: int


class Binding:
    """Fixed buffers for one session. A buffer bound as input and output is updated in place.

    Binding costs time for each buffer; a run costs none for buffers that stay as they are.
    """

    def __init__(self, inner: Any, ort: Any, file: str) -> None:
        self._inner = inner
        self._ort = ort
        self._file = file
        self._binding = inner.io_binding()
        # By address, so that a buffer bound twice is one value; the array is kept with it, because
        # an address is only unique among living objects and ONNX Runtime does not own the memory.
        self._values: dict[int, tuple[Any, Array]] = {}

    def _value(self, buffer: Array | DeviceArray) -> Any:
        if isinstance(buffer, DeviceArray):
            return buffer.value
        # On CPU an OrtValue made from an array uses the array's own memory, but only if the array
        # is contiguous: otherwise it is a copy, and writes on either side would go unseen.
        if not (buffer.flags.c_contiguous and buffer.flags.writeable):
            raise ValueError("a bound buffer must be C-contiguous and writable")
        key = id(buffer)
        if key not in self._values:
            self._values[key] = (self._ort.OrtValue.ortvalue_from_numpy(buffer), buffer)
        return self._values[key][0]

    def input(self, name: str, buffer: Array | DeviceArray | DeviceRow) -> None:
        """Bind an array as input; later changes to its contents are seen.

        On a GPU that holds for device arrays only: others are copied there when they are bound.

        Raises:
            ValueError: If the array is not C-contiguous and writable.
        """
        if isinstance(buffer, DeviceRow):
            self._binding.bind_input(name, *_place(buffer))
        else:
            self._binding.bind_ortvalue_input(name, self._value(buffer))

    def output(self, name: str, buffer: Array | DeviceArray | DeviceRow) -> None:
        """Bind an array as output.

        Raises:
            ValueError: If the array is not C-contiguous and writable.
        """
        if isinstance(buffer, DeviceRow):
            self._binding.bind_output(name, *_place(buffer))
        else:
            self._binding.bind_ortvalue_output(name, self._value(buffer))

    def run(self, capture: int | None = None) -> None:
        """Run on the bound buffers; nothing is fetched or copied.

        Args:
            capture: In a session that records: the recording to make or to replay; -1 for none.
        """
        options = None
        if capture is not None:
            options = self._ort.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(capture))
        try:
            self._inner.run_with_iobinding(self._binding, options)
        except Exception as error:
            raise run_error(self._file, error) from error


def _place(row: DeviceRow) -> tuple[Any, ...]:
    return row.owner.device, 0, row.owner.dtype.type, list(row.shape), row.address
