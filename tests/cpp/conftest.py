"""Builds the C++ runtime once; skips, with the reason, where something for that is missing.

`HEADPORT_CPP_SANITIZE=address,undefined` or `=thread` in the environment builds it, and all that
these tests build, with those sanitizers.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headport.runtime import Generator
from tests.cpp.served import MODEL, Served
from tests.kernels import conftest as kernels

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "runtime" / "cpp"
SERVICE = ROOT / "examples" / "cpp-service"
SANITIZE = os.environ.get("HEADPORT_CPP_SANITIZE", "")
# Kept, so that later runs build what has changed.
BUILD = ROOT / "build" / "-".join(["cpp", *filter(None, SANITIZE.split(","))])

# What tests check does not depend on the optimiser, and the slowest part of them is the compiler.
FLAGS = (
    "-DCMAKE_BUILD_TYPE=None",
    "-DCMAKE_CXX_FLAGS=-O1",
    "-DHEADPORT_TESTS=ON",
    f"-DHEADPORT_SANITIZE={SANITIZE}",
    f"-DTENSORRT_INCLUDE_DIR={os.environ.get('TENSORRT_INCLUDE_DIR', '')}",
)

# ONNX Runtime is not built here and has no instrumentation; the files say what of it is left out.
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1",
    "LSAN_OPTIONS": f"suppressions={SOURCE / 'tests' / 'lsan.supp'}:print_suppressions=0",
    "TSAN_OPTIONS": f"suppressions={SOURCE / 'tests' / 'tsan.supp'}:halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def missing() -> str | None:
    """Why the library cannot be built here."""
    if not Path("/usr/include/nlohmann/json.hpp").is_file():
        return "nlohmann-json3-dev is not installed"
    return kernels.missing()


def run(*command: str | Path) -> None:
    environment = os.environ | SANITIZER_OPTIONS
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def failed(
    build: Path,
    onnxruntime: Path | str,
    bundle: Path,
    folder: Path,
    options: dict[str, Any] | None = None,
) -> str:
    """What a request prints that is refused."""
    requests = folder / "requests.json"
    requests.write_text(json.dumps([{"prompts": [[5, 9, 2]], "options": options or {}}]))
    done = subprocess.run(
        [build / "tests" / "run_requests", bundle, requests, folder / "replies"],
        env=SANITIZER_OPTIONS | {"HEADPORT_ORT": str(onnxruntime)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, f"{done.returncode} {done.stdout} {done.stderr}"
    return done.stderr


@contextmanager
def locked() -> Iterator[None]:
    """Workers of pytest-xdist share the folder of the build."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def build() -> Path:
    """The folder with the built library and test programs."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with locked():
        run("cmake", "-S", SOURCE, "-B", BUILD, *FLAGS)
        run("cmake", "--build", BUILD, "--parallel", "2")
    return BUILD


@pytest.fixture(scope="session")
def installed(build: Path) -> Path:
    """Where the built library is installed, as its users have it."""
    folder = build / "installed"
    with locked():
        run("cmake", "--install", build, "--prefix", folder)
    return folder


@pytest.fixture(scope="session")
def onnxruntime() -> Path:
    """The shared library inside the Python package: a file, loaded by a program without Python."""
    spec = find_spec("onnxruntime")
    assert spec is not None and spec.origin is not None
    return next((Path(spec.origin).parent / "capi").glob("libonnxruntime.so.*"))


@pytest.fixture(scope="session")
def program(build: Path, installed: Path) -> Path:
    """The built service."""
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    found = subprocess.run(["pkg-config", "cpp-httplib"], check=False, capture_output=True)
    if found.returncode != 0:
        pytest.skip("libcpp-httplib-dev is not installed")
    folder = build / "service"
    with locked():
        run("cmake", "-S", SERVICE, "-B", folder, f"-DCMAKE_PREFIX_PATH={installed}", *FLAGS[:2])
        run("cmake", "--build", folder, "--parallel", "2")
    return folder / "headport-service"


@pytest.fixture(scope="session")
def start(program: Path, onnxruntime: Path, tiny_lowered: Path) -> Callable[..., Any]:
    """`with start("--option", …) as service` → a service on a free port."""

    @contextmanager
    def started(*words: str, bundle: Path = tiny_lowered) -> Iterator[Served]:
        pytest.importorskip("openai")
        command = [program, bundle, "--port", "0", "--name", MODEL, "--threads", "1", *words]
        environment = SANITIZER_OPTIONS | {"HEADPORT_ORT": str(onnxruntime)}
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            try:
                assert process.stderr is not None
                line = process.stderr.readline()
                found = re.search(r"tiny at (http://127\.0\.0\.1:\d+)/v1", line)
                assert found, line + process.stderr.read()
                yield Served(process, found[1])
            finally:
                process.kill()

    return started


@pytest.fixture(scope="module")
def service(start: Any) -> Iterator[Served]:
    with start("--workers", "2") as found:
        yield found
        status, rest = found.stopped()
    assert status == 0, rest


@pytest.fixture(scope="module")
def generator(tiny_lowered: Path) -> Generator:
    return Generator(tiny_lowered, threads=1)
