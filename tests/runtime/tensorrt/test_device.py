"""Calls of the driver, on a stand-in that keeps a current context per thread, as CUDA does."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headport.errors import EngineError
from headport.runtime.tensorrt.device import CudaDevice, Memory

CONTEXT, NO_CONTEXT, OUT_OF_MEMORY = 77, 201, 2


class Driver:
    """The calls that a device makes; memory is counted, not held."""

    def __init__(self) -> None:
        self._current = threading.local()
        self.held: set[int] = set()
        self.room = 2

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def cuDevicePrimaryCtxRetain(self, context: Any, _: Any) -> int:  # noqa: N802 - the driver's name
        context._obj.value = CONTEXT
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self._current.context = context.value
        return 0

    def cuMemAlloc_v2(self, address: Any, _: Any) -> int:  # noqa: N802
        if getattr(self._current, "context", None) != CONTEXT:
            return NO_CONTEXT
        if len(self.held) == self.room:
            return OUT_OF_MEMORY
        address._obj.value = 4096 + len(self.held)
        self.held.add(address._obj.value)
        return 0

    def cuMemFree_v2(self, address: Any) -> int:  # noqa: N802
        if getattr(self._current, "context", None) != CONTEXT:
            return NO_CONTEXT
        self.held.remove(address.value)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: found)
    return found


def test_a_device_works_in_threads_that_did_not_make_it(driver: Driver) -> None:
    device = CudaDevice()
    with ThreadPoolExecutor(1) as pool:
        address = pool.submit(device.allocate, 8).result()
    assert driver.held == {address}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(device.free, address).result()
    assert not driver.held


def test_memory_that_is_let_go_is_freed_and_a_refusal_is_named(driver: Driver) -> None:
    device = CudaDevice()
    kept = [Memory(device) for _ in range(3)]
    for memory in kept[:2]:
        memory.reserve(16)
    with pytest.raises(EngineError, match=r"refuses cuMemAlloc_v2: CUDA error 2; .*doctor"):
        kept[2].reserve(16)
    del memory, kept
    assert not driver.held
