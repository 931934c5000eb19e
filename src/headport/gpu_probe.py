"""Whether a GPU can be used: the NVIDIA driver, and the libraries that a provider asks for.

ONNX Runtime runs on the CPU, without an error, where a driver, a library or the card is missing;
other libraries crash. So the driver is asked first, with nothing but ctypes.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from ctypes.util import find_library
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = [
    "Gpu",
    "GpuProbe",
    "absent_libraries",
    "library_packages",
    "load_library",
    "needed_libraries",
    "probe_gpu",
]


@dataclass(frozen=True)
class Gpu:
    """One card, as the driver describes it."""

    name: str
    compute_capability: str  # such as "9.0"
    memory_bytes: int


@dataclass(frozen=True)
class GpuProbe:
    """What the driver said. `fault` is None where at least one card can be used."""

    driver: str | None  # newest CUDA version the driver serves, such as "13.0"
    gpus: tuple[Gpu, ...]
    fault: str | None

    def __bool__(self) -> bool:
        return self.fault is None


_DRIVER = "libcuda.so.1"
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@cache
def probe_gpu() -> GpuProbe:
    """Ask the NVIDIA driver for cards, without any CUDA library: loading, cuInit, count."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return GpuProbe(None, (), f"{_DRIVER} cannot be loaded: no NVIDIA driver is installed here")
    status = driver.cuInit(0)
    if status != 0:
        return GpuProbe(None, (), f"the NVIDIA driver does not start (cuInit gives {status})")
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    text = f"{version.value // 1000}.{version.value % 1000 // 10}"
    driver.cuDeviceGetCount(ctypes.byref(count))
    gpus = tuple(_gpu(driver, index) for index in range(count.value))
    return GpuProbe(text, gpus, None if gpus else "the NVIDIA driver knows no GPU")


def _gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    memory, parts = ctypes.c_size_t(), (ctypes.c_int(), ctypes.c_int())
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    for part, attribute in zip(parts, (_CAPABILITY_MAJOR, _CAPABILITY_MINOR), strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
    capability = f"{parts[0].value}.{parts[1].value}"
    return Gpu(name.value.decode(errors="replace"), capability, memory.value)


def load_library(name: str) -> bool:
    """Load a shared library into this process, from the system or from NVIDIA's Python packages.

    What is loaded under its name is found by libraries that ask for that name later.
    """
    packaged = (
        str(file) for entry in sys.path for file in sorted(Path(entry).glob(f"nvidia/*/lib/{name}"))
    )
    for place in (name, *packaged):
        try:
            ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return True
    return False


# Library → distribution that brings it, by CUDA's major version; {0} is that version.
_PACKAGES = (
    (r"libcublas(Lt)?\.so\.(\d+)", "nvidia-cublas{}"),
    (r"libcudart\.so\.(\d+)", "nvidia-cuda-runtime{}"),
    (r"libcurand\.so\.(\d+)", "nvidia-curand{}"),
    (r"libcufft\.so\.(\d+)", "nvidia-cufft{}"),
    (r"libcudnn\.so\.(\d+)", "nvidia-cudnn-cu{}"),
    (r"libnvinfer\.so\.(\d+)", "tensorrt=={}.*"),
    (r"libnvonnxparser\.so\.(\d+)", "tensorrt=={}.*"),
)
_SUFFIXED_CUDA = 12  # up to here NVIDIA's packages carry the version: nvidia-cublas-cu12


def library_packages(libraries: tuple[str, ...]) -> dict[str, str]:
    """Library file name → what brings it, for an explanation of missing ones.

    Args:
        libraries: All that a provider needs; the CUDA version is read off `libcudart`.
    """
    found = (re.match(r"libcudart\.so\.(\d+)", name) for name in libraries)
    cuda = next((int(match.group(1)) for match in found if match), 13)
    return {name: _package(name, cuda) for name in libraries}


def _package(library: str, cuda: int) -> str:
    if library == _DRIVER:
        return "the NVIDIA driver"
    for pattern, package in _PACKAGES:
        match = re.fullmatch(pattern, library)
        if match is None:
            continue
        if package.startswith("tensorrt"):
            return f"pip install {package.format(match.group(1))}"
        if package.endswith("-cu{}"):
            return f"pip install {package.format(cuda)}"
        return f"pip install {package.format(f'-cu{cuda}' if cuda <= _SUFFIXED_CUDA else '')}"
    return "not known to headport"


def absent_libraries(libraries: tuple[str, ...]) -> dict[str, str]:
    """Libraries that do not load → what brings each, and which other version of it is here."""
    sources = library_packages(libraries)
    missing = [name for name in libraries if not load_library(name)]
    return {name: sources[name] + _instead(name) for name in missing}


def _instead(library: str) -> str:
    stem = library.split(".so.", maxsplit=1)[0]
    places = (f"nvidia/*/lib/{stem}.so.*", f"tensorrt*libs/{stem}.so.*")
    found = {
        file.name for entry in sys.path for pattern in places for file in Path(entry).glob(pattern)
    }
    if (installed := find_library(stem.removeprefix("lib"))) is not None:
        found.add(installed)
    others = sorted(found - {library})
    return f"; {', '.join(others)} is here, but of another version" if others else ""


_DYNAMIC, _NEEDED = 6, 1  # section type SHT_DYNAMIC, tag DT_NEEDED


def needed_libraries(file: Path) -> tuple[str, ...]:
    """Names of the shared libraries that an ELF file (64 bit, little-endian) asks for."""
    with file.open("rb") as stream:
        header = stream.read(64)
        if header[:6] != b"\x7fELF\x02\x01":
            return ()
        [sections] = struct.unpack_from("<Q", header, 40)
        size, count = struct.unpack_from("<HH", header, 58)
        stream.seek(sections)
        table = stream.read(size * count)
        rows = [struct.unpack_from("<IIQQQQII", table, i * size) for i in range(count)]
        dynamic = next((row for row in rows if row[1] == _DYNAMIC), None)
        if dynamic is None:
            return ()
        stream.seek(dynamic[4])
        entries = list(struct.iter_unpack("<qQ", stream.read(dynamic[5] // 16 * 16)))
        strings = rows[dynamic[6]]  # sh_link names the section of its strings
        stream.seek(strings[4])
        text = stream.read(strings[5])
    names = [text[at : text.index(b"\0", at)].decode() for tag, at in entries if tag == _NEEDED]
    return tuple(name for name in names if re.match(r"lib(cu|nv)", name))
