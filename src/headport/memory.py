"""What a bundle takes of this machine's memory, measured: sessions are loaded in a fresh process.

Bytes of tensors promise little: a runtime may widen, repack or share a weight. So the child process
reads its own resident memory from the operating system after each step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headport.errors import BundleError, UsageError

__all__ = ["MemoryUse", "measure_memory"]

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class MemoryUse:
    """Growth of resident memory in bytes, in the order it happens.

    `private` belongs to the process alone; the rest of `total` are pages of files, which the system
    may share between processes and drop.
    """

    backbone: int  # session of the backbone loaded
    heads: int  # sessions of the heads loaded
    first_run: int  # one token through both
    total: int
    private: int


def measure_memory(bundle: Path, threads: int = 0) -> MemoryUse:
    """Load a bundle in a process of its own, run one token, and see what each step took.

    Args:
        bundle: The bundle's folder.
        threads: Threads of ONNX Runtime; 0 = all CPUs.

    Raises:
        UsageError: If the operating system does not say what a process uses.
        BundleError: If the bundle does not load there.
    """
    if not _STATUS.is_file():
        raise UsageError("--memory needs Linux's /proc; leave it out on this system")
    command = [sys.executable, "-m", "headport.memory", str(bundle), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BundleError(f"{bundle}: loading it to measure its memory failed: {last}")
    return msgspec.json.decode(done.stdout, type=MemoryUse)


def _resident() -> tuple[int, int]:
    """Resident bytes of this process: all, and private ones."""
    values = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    total, private = (int(values[key].split()[0]) * 1024 for key in ("VmRSS", "RssAnon"))
    return total, private


def _measure(folder: Path, threads: int) -> MemoryUse:
    import numpy as np

    from headport.bundle import Bundle
    from headport.heads import HeadSessions
    from headport.runner import open_runner
    from headport.session import SessionSettings, library_version

    library_version()  # loads ONNX Runtime itself
    bundle = Bundle.open(folder, verify=False)
    settings = SessionSettings(threads=threads)
    start, private = _resident()
    runner = open_runner(bundle, settings, heads=())
    after_backbone, _ = _resident()
    heads = HeadSessions(bundle, settings.for_target(bundle.manifest.target), None)
    loaded, _ = _resident()
    cache = runner.new_cache(1, 4)
    hidden = runner.forward(cache, np.zeros((1, 1), np.int64), np.ones(1, np.int64))
    for name in bundle.manifest.heads:
        heads.head(hidden[:, 0], name)
    total, now_private = _resident()
    return MemoryUse(
        backbone=after_backbone - start,
        heads=loaded - after_backbone,
        first_run=total - loaded,
        total=total - start,
        private=now_private - private,
    )


if __name__ == "__main__":
    found = _measure(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.write(msgspec.json.encode(found).decode())
