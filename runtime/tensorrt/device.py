"""Memory of a GPU and a stream of work on it, through the driver's own interface (ctypes).

Plans share the device's primary context, which CUDA's runtime library uses as well.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headport.errors import EngineError

__all__ = ["CudaDevice", "Device", "Memory", "nbytes"]

Array = npt.NDArray[Any]


class Device(Protocol):
    """Where a plan runs."""

    stream: int  # handle that executions are given

    def allocate(self, size: int) -> int:
        """Address of `size` bytes, at least one."""
        ...

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""
        ...

    def upload(self, address: int, array: Array) -> None:
        """Copy a contiguous array to an address."""
        ...

    def download(self, address: int, array: Array) -> None:
        """Copy from an address into a contiguous array; waits for all work before it."""
        ...


class Memory:
    """Bytes on a device that grow as needed; freed with the object."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.address = 0
        self._size = 0

    def reserve(self, size: int) -> int:
        """Room for `size` bytes; what was there is lost if it has to grow."""
        if size > self._size or self.address == 0:
            self._release()
            self.address = self._device.allocate(max(1, size))
            self._size = size
        return self.address

    def _release(self) -> None:
        if self.address:
            self._device.free(self.address)
        self.address = self._size = 0

    def __del__(self) -> None:
        self._release()


class CudaDevice:
    """The first GPU. Make it only after `probe_gpu` has found one."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._check("cuInit", 0)
        device, stream = ctypes.c_int(), ctypes.c_void_p()
        self._context = ctypes.c_void_p()
        self._check("cuDeviceGet", ctypes.byref(device), 0)
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._call("cuStreamCreate", ctypes.byref(stream), 0)
        self.stream = int(stream.value or 0)

    def _call(self, name: str, *arguments: Any) -> None:
        # A context is current in one thread only, and a scheduler works in a thread of its own.
        self._check("cuCtxSetCurrent", self._context)
        self._check(name, *arguments)

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            raise EngineError(
                f"the NVIDIA driver refuses {name}: CUDA error {status}; `headport doctor` says "
                "what it finds of the GPU"
            )

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        # Errors here are those of work before it, and nobody can act on them any more.
        self._cuda.cuCtxSetCurrent(self._context)
        self._cuda.cuMemFree_v2(ctypes.c_uint64(address))

    def upload(self, address: int, array: Array) -> None:
        assert array.flags.c_contiguous
        if array.nbytes:
            self._call(
                "cuMemcpyHtoDAsync_v2",
                ctypes.c_uint64(address),
                ctypes.c_void_p(array.ctypes.data),
                ctypes.c_size_t(array.nbytes),
                ctypes.c_void_p(self.stream),
            )
            # The array may be gone when the copy starts.
            self._wait()

    def download(self, address: int, array: Array) -> None:
        assert array.flags.c_contiguous
        if array.nbytes:
            self._call(
                "cuMemcpyDtoHAsync_v2",
                ctypes.c_void_p(array.ctypes.data),
                ctypes.c_uint64(address),
                ctypes.c_size_t(array.nbytes),
                ctypes.c_void_p(self.stream),
            )
        self._wait()

    def _wait(self) -> None:
        self._call("cuStreamSynchronize", ctypes.c_void_p(self.stream))


def nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Bytes of a dense array."""
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
