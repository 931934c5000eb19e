"""The process that builds one plan: `python -m headport.runtime.engine.worker < REQUEST`.

A builder may abort, hang or grow without bound; in a process of its own that costs a plan and not
the command. The libraries number parts of a plan in the order of their addresses, so what decides
addresses is kept equal:

- no address space randomisation, and no path, name or variable of this run among its arguments, its
  environment and its module search path;
- one CPU, for which the libraries start no threads of their own, whose overlap would decide;
- a thread of ours, because the C library gives it a heap of its own: Python's is full of holes that
  depend on whether a module had to be compiled first.

Heads then give the same plan each time and small decoders nearly always; of SmolLM2's backbone a
few numbers still differ.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from headport.errors import EngineError
from headport.runtime.engine.backends import load_backend
from headport.runtime.engine.builder import build_plan
from headport.runtime.engine.request import BuildAnswer, BuildRequest

__all__ = ["build_apart"]

_POLL_SECONDS = 0.1
_ANSWER = "answer.json"  # in the working directory
_COMMAND = (sys.executable, "-P", "-m", "headport.runtime.engine.worker")
_KEPT = ("HOME", "LANG", "PATH", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR")  # of the environment
_KEPT_BEGINNINGS = ("CUDA", "DYLD_", "HEADPORT_", "LD_", "NVIDIA", "PYTHON", "TENSORRT", "TRT")
_ASK, _NO_RANDOMISATION = 0xFFFFFFFF, 0x0040000  # of personality(2)


def build_apart(
    request: BuildRequest, folder: Path, *, timeout_s: int, memory_bytes: int | None = None
) -> BuildAnswer:
    """Build a plan in a process of its own.

    Args:
        request: What to build.
        folder: An existing folder for its messages.
        timeout_s: Seconds after which it is ended.
        memory_bytes: Resident memory beyond which it is ended; None: no bound.

    Raises:
        EngineError: If the process was ended, or ended without an answer.
    """
    asked, said = folder / "request.json", folder / "said.txt"
    model = Path(request.model)
    made, answered = model.with_name(f"{model.name}.plan"), model.with_name(_ANSWER)
    told = msgspec.structs.replace(request, model=model.name, plan=made.name)
    asked.write_bytes(msgspec.json.encode(told))
    try:
        with asked.open("rb") as question, said.open("wb") as stream:
            process = subprocess.Popen(
                _COMMAND,
                stdin=question,
                stdout=stream,
                stderr=stream,
                env=_environment(),
                cwd=model.parent,
            )
            try:
                why = _watch(process, timeout_s, memory_bytes)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if why is not None:
            raise EngineError(f"building a plan of {model.name} was ended: {why}")
        if process.returncode != 0 or not answered.is_file():
            raise EngineError(
                f"the process that builds a plan of {model.name} ended {_way(process.returncode)}: "
                f"{_tail(said)}"
            )
        answer = msgspec.json.decode(answered.read_bytes(), type=BuildAnswer)
        if answer.error is None:
            made.replace(request.plan)
        return answer
    finally:
        made.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or name.startswith(_KEPT_BEGINNINGS)
    }
    return kept | {"PYTHONHASHSEED": "0"}


def _watch(
    process: subprocess.Popen[bytes], timeout_s: int, memory_bytes: int | None
) -> str | None:
    end = time.monotonic() + timeout_s
    while process.poll() is None:
        if time.monotonic() > end:
            return f"it took more than {timeout_s} s (--timeout)"
        resident = _resident(process.pid)
        if memory_bytes is not None and resident > memory_bytes:
            return (
                f"it took {resident >> 20} MiB of memory, {memory_bytes >> 20} are allowed "
                "(--memory)"
            )
        time.sleep(_POLL_SECONDS)
    return None


def _resident(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:  # it has just ended, or the system has no /proc
        return 0
    lines = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(lines[0].split()[1]) * 1024 if lines else 0


def _way(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _tail(file: Path) -> str:
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    return " / ".join(text.splitlines()[-3:]) or "it said nothing"


def _settle_addresses() -> None:
    """Start this process anew without address space randomisation, where the system allows it."""
    if sys.platform != "linux":
        return
    # Which CPU does not matter to the plan, and builds beside each other should not share one.
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[os.getpid() % len(allowed)]})
    libc = ctypes.CDLL(None)
    old = libc.personality(_ASK)
    if old == -1 or old & _NO_RANDOMISATION or libc.personality(old | _NO_RANDOMISATION) == -1:
        return
    os.execv(sys.executable, _COMMAND)


def _main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=BuildRequest)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(lambda: build_plan(load_backend(request.backend), request)).result()
    Path(_ANSWER).write_bytes(msgspec.json.encode(answer))


if __name__ == "__main__":
    _settle_addresses()
    _main()
