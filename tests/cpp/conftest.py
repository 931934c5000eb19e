"""Builds the C++ runtime once; skips, with the reason, where something for that is missing."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "runtime" / "cpp"
BUILD = ROOT / "build" / "cpp"  # kept, so that later runs build what has changed

# What tests check does not depend on the optimiser, and the slowest part of them is the compiler.
FLAGS = ("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1", "-DHEADPORT_TESTS=ON")


def missing() -> str | None:
    """Why the library cannot be built here."""
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    headers = ROOT / "build" / "ort-headers" / "onnxruntime_c_api.h"
    places = (headers, Path("/usr/include/onnxruntime/onnxruntime_c_api.h"))
    if not any(place.is_file() for place in places):
        return "ONNX Runtime's C headers are not there; `sh runtime/cpp/fetch_headers.sh` gets them"
    if not Path("/usr/include/nlohmann/json.hpp").is_file():
        return "nlohmann-json3-dev is not installed"
    return None


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.fixture(scope="session")
def build() -> Path:
    """The folder with the built library and test programs."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / ".lock").open("w") as lock:  # workers of pytest-xdist share the folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        run("cmake", "-S", SOURCE, "-B", BUILD, *FLAGS)
        run("cmake", "--build", BUILD, "--parallel", "2")
    return BUILD


@pytest.fixture(scope="session")
def onnxruntime() -> Path:
    """The shared library inside the Python package: a file, loaded by a program without Python."""
    spec = find_spec("onnxruntime")
    assert spec is not None and spec.origin is not None
    return next((Path(spec.origin).parent / "capi").glob("libonnxruntime.so.*"))
