"""A real tritonserver on the CPU: the one that nvidia-pytriton brings, with its python backend."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["NEEDS_TRITON", "Server", "installed", "running"]

_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Server:
    """Where it listens, and what it says."""

    http: str
    grpc: str
    log: Path

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def installed() -> Path | None:
    """The folder of tritonserver; None where it is not installed for this interpreter."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "tritonserver"
    return folder if (folder / "bin" / "tritonserver").is_file() else None


NEEDS_TRITON = pytest.mark.skipif(
    installed() is None, reason="nvidia-pytriton is not installed here; run `make test-triton`"
)


@contextmanager
def running(repository: Path, scratch: Path, *models: str) -> Iterator[Server]:
    """Serve a repository, with these models loaded; ended with the block."""
    folder = installed()
    assert folder is not None
    backends = _backends(folder, scratch)
    ports = _free_ports(2)
    http, grpc = (f"127.0.0.1:{port}" for port in ports)
    log = scratch / "triton.log"
    command = [
        str(folder / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        *("--model-control-mode=explicit", "--exit-on-error=false", "--allow-metrics=false"),
        *(f"--load-model={name}" for name in models),
        *("--http-address=127.0.0.1", f"--http-port={ports[0]}"),
        *("--grpc-address=127.0.0.1", f"--grpc-port={ports[1]}"),
        f"--backend-config=python,shm-region-prefix-name=headport{os.getpid()}x{ports[0]}",
    ]
    # The stub embeds a shared libpython, which must be that of the environment's interpreter.
    libraries = (folder.parent.parent / "nvidia_pytriton.libs", sysconfig.get_config_var("LIBDIR"))
    environment = os.environ | {
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
    server = Server(http, grpc, log)
    try:
        _await(server, process)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _backends(folder: Path, scratch: Path) -> Path:
    """The python backend with the stub of this interpreter's version, as Triton expects them."""
    target = scratch / "backends" / "python"
    if not target.exists():
        shutil.copytree(folder / "backends" / "python", target)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = folder / "python_backend_stubs" / version / "triton_python_backend_stub"
        shutil.copy2(stub, target / stub.name)
    return target.parent


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _await(server: Server, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        assert process.poll() is None, server.said()
        try:
            with urllib.request.urlopen(f"http://{server.http}/v2/health/live", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"tritonserver does not answer: {server.said()}")
