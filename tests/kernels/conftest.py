"""Builds the library of kernels once; skips, with the reason, where something for that is missing.

`HEADPORT_CPP_SANITIZE=address,undefined` builds its own test with those sanitizers; Python then
loads a plain build beside it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "runtime" / "kernels"
BUILD = ROOT / "build" / "kernels-test"
SANITIZE = os.environ.get("HEADPORT_CPP_SANITIZE", "")


def missing() -> str | None:
    """Why the library cannot be built here."""
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    headers = ROOT / "build" / "ort-headers" / "onnxruntime_c_api.h"
    places = (headers, Path("/usr/include/onnxruntime/onnxruntime_c_api.h"))
    if not any(place.is_file() for place in places):
        return "ONNX Runtime's C headers are not there; `sh runtime/cpp/fetch_headers.sh` gets them"
    return None


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def built(folder: Path, *flags: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:  # workers of pytest-xdist share it
        fcntl.flock(lock, fcntl.LOCK_EX)
        run("cmake", "-S", SOURCE, "-B", folder, "-DHEADPORT_TESTS=ON", *flags)
        run("cmake", "--build", folder, "--parallel", "2")
    return folder


@pytest.fixture(scope="session")
def build() -> Path:
    """The folder with the built library and its test."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    return built(BUILD)


@pytest.fixture(scope="session")
def tested(build: Path) -> Path:
    """The same, with sanitizers where they are asked for."""
    if not SANITIZE:
        return build
    folder = build.with_name("-".join([build.name, *SANITIZE.split(",")]))
    return built(folder, f"-DHEADPORT_SANITIZE={SANITIZE}")


@pytest.fixture(scope="session")
def library(build: Path) -> Path:
    return build / "libheadport_kernels.so"
