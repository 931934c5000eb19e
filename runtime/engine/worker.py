"""The process that builds one plan: `python -m headport.runtime.engine.worker REQUEST ANSWER`.

A builder may abort, hang or grow without bound; in a process of its own that costs a plan and not
the command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from headport.errors import EngineError
from headport.runtime.engine.backends import load_backend
from headport.runtime.engine.builder import build_plan
from headport.runtime.engine.request import BuildAnswer, BuildRequest

__all__ = ["build_apart"]

_POLL_SECONDS = 0.1


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
    asked, answered, said = (folder / n for n in ("request.json", "answer.json", "said.txt"))
    asked.write_bytes(msgspec.json.encode(request))
    answered.unlink(missing_ok=True)
    command = [sys.executable, "-m", __spec__.name, str(asked), str(answered)]
    what = Path(request.model).name
    with said.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=os.environ)
        try:
            why = _watch(process, timeout_s, memory_bytes)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if why is not None:
        raise EngineError(f"building a plan of {what} was ended: {why}")
    if process.returncode != 0 or not answered.is_file():
        raise EngineError(
            f"the process that builds a plan of {what} ended {_way(process.returncode)}: "
            f"{_tail(said)}"
        )
    return msgspec.json.decode(answered.read_bytes(), type=BuildAnswer)


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


def _main(asked: Path, answered: Path) -> None:
    request = msgspec.json.decode(asked.read_bytes(), type=BuildRequest)
    answer = build_plan(load_backend(request.backend), request)
    answered.write_bytes(msgspec.json.encode(answer))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
