"""The driver is asked before anything else, and missing libraries are told apart."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headport import gpu_probe
from headport.gpu_probe import (
    absent_libraries,
    library_packages,
    load_library,
    needed_libraries,
    probe_gpu,
)


class _Driver:
    """libcuda with `count` cards, as ctypes shows it."""

    def __init__(self, status: int = 0, count: int = 1) -> None:
        self.status, self.count = status, count

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the driver's name
        assert flags == 0
        return self.status

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 13020
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:  # noqa: N802
        name.value = f"Card {device.value}".encode()
        return int(size < 8)

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:  # noqa: N802
        memory._obj.value = (device.value + 1) << 30
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:  # noqa: N802
        value._obj.value = {75: 9, 76: device.value}[attribute]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def plant(found: _Driver | None) -> None:
        def load(name: str, **_: Any) -> Any:
            assert name == "libcuda.so.1"
            if found is None:
                raise OSError("cannot open shared object file")
            return found

        monkeypatch.setattr(gpu_probe.ctypes, "CDLL", load)
        probe_gpu.cache_clear()

    yield plant
    probe_gpu.cache_clear()


def test_cards(driver: Any) -> None:
    driver(_Driver(count=2))
    found = probe_gpu()
    assert found and found.driver == "13.2"
    assert [(g.name, g.compute_capability, g.memory_bytes) for g in found.gpus] == [
        ("Card 0", "9.0", 1 << 30),
        ("Card 1", "9.1", 2 << 30),
    ]


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        (None, "no NVIDIA driver is installed"),
        (_Driver(status=100), r"cuInit gives 100"),
        (_Driver(count=0), "knows no GPU"),
    ],
)
def test_faults(driver: Any, planted: _Driver | None, fault: str) -> None:
    driver(planted)
    found = probe_gpu()
    assert not found and fault in str(found.fault)


def _elf(names: list[str]) -> bytes:
    """A shared object that has nothing but a dynamic section with these NEEDED entries."""
    strings, offsets = b"\0", []
    for name in names:
        offsets.append(len(strings))
        strings += name.encode() + b"\0"
    dynamic = b"".join(struct.pack("<qQ", 1, at) for at in offsets) + struct.pack("<qQ", 0, 0)
    at_dynamic, at_strings = 64, 64 + len(dynamic)
    at_sections = at_strings + len(strings)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, at_sections, 0, 64, 0, 0, 64, 3, 0)
    sections = bytes(64)
    for kind, at, size, link in (
        (6, at_dynamic, len(dynamic), 2),
        (3, at_strings, len(strings), 0),
    ):
        sections += struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, at, size, link, 0, 8, 0)
    return header + dynamic + strings + sections


def test_needed_libraries(tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    file.write_bytes(_elf(["libc.so.6", "libcudart.so.13", "libnvinfer.so.10", "libm.so.6"]))
    assert needed_libraries(file) == ("libcudart.so.13", "libnvinfer.so.10")
    file.write_bytes(b"#!/bin/sh\n" + bytes(64))
    assert needed_libraries(file) == ()
    real = next(Path(ctypes.__file__).parent.parent.glob("lib-dynload/_ctypes*.so"))
    assert needed_libraries(real) == ()


def test_packages_follow_the_cuda_version() -> None:
    assert library_packages(("libcublasLt.so.13", "libcudart.so.13", "libcudnn.so.9")) == {
        "libcublasLt.so.13": "pip install nvidia-cublas",
        "libcudart.so.13": "pip install nvidia-cuda-runtime",
        "libcudnn.so.9": "pip install nvidia-cudnn-cu13",
    }
    twelve = library_packages(("libcublas.so.12", "libcudart.so.12", "libcuda.so.1"))
    assert twelve["libcublas.so.12"] == "pip install nvidia-cublas-cu12"
    assert twelve["libcuda.so.1"] == "the NVIDIA driver"
    assert library_packages(("libnvinfer.so.10",))["libnvinfer.so.10"] == (
        "pip install tensorrt==10.*"
    )


def test_libraries_of_nvidias_packages_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.99").touch()
    tried: list[str] = []

    def load(name: str, **_: Any) -> None:
        tried.append(name)
        if "/" not in name:
            raise OSError(name)

    monkeypatch.setattr(gpu_probe.ctypes, "CDLL", load)
    monkeypatch.setattr(gpu_probe.sys, "path", [str(tmp_path)])
    assert load_library("libcudart.so.99")
    assert tried == ["libcudart.so.99", str(folder / "libcudart.so.99")]
    assert not load_library("libcublas.so.99")


def test_another_version_of_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt_cu13_libs").mkdir()
    (tmp_path / "tensorrt_cu13_libs" / "libnvinfer.so.11").touch()
    monkeypatch.setattr(gpu_probe.sys, "path", [str(tmp_path)])
    monkeypatch.setattr(gpu_probe, "load_library", lambda name: name == "libcudart.so.13")
    found = {"cudnn": "libcudnn.so.8"}
    monkeypatch.setattr(gpu_probe, "find_library", found.get)
    needed = ("libnvinfer.so.10", "libcudnn.so.9", "libcudart.so.13", "libcublas.so.13")
    assert absent_libraries(needed) == {
        "libnvinfer.so.10": "pip install tensorrt==10.*; libnvinfer.so.11 is here, but of another "
        "version",
        "libcudnn.so.9": "pip install nvidia-cudnn-cu13; libcudnn.so.8 is here, but of another "
        "version",
        "libcublas.so.13": "pip install nvidia-cublas",
    }
