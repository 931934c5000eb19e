"""What a bundle takes of this machine's memory, measured: sessions are loaded in a fresh process.

Bytes of tensors promise little: a runtime may widen, repack or share a weight. So the child process
reads its own resident memory from the operating system after each step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headport.errors import BundleError, UsageError

__all__ = ["MEASURABLE", "MemoryUse", "measure_graph", "measure_memory"]

_STATUS = Path("/proc/self/status")
MEASURABLE = _STATUS.is_file()  # whether the operating system says what a process uses


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
    return msgspec.json.decode(_say(bundle, "bundle", str(threads)), type=MemoryUse)


def measure_graph(file: Path, session_options: Mapping[str, str], threads: int = 0) -> int:
    """What one graph takes of resident memory, bytes: loaded, and run once with sizes of 1.

    Args:
        file: The `.onnx` file.
        session_options: As the bundle's manifest has them.
        threads: Threads of ONNX Runtime; 0 = all CPUs.

    Raises:
        UsageError: If the operating system does not say what a process uses.
        BundleError: If the graph does not load there.
    """
    options = msgspec.json.encode(dict(session_options)).decode()
    return msgspec.json.decode(_say(file, "graph", str(threads), options), type=int)


def _say(path: Path, *arguments: str) -> str:
    """What this file says about a path when it is run as a program."""
    if not MEASURABLE:
        raise UsageError("measuring memory needs Linux's /proc; leave it out on this system")
    command = [sys.executable, "-m", "headport.memory", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BundleError(f"{path}: loading it to measure its memory failed: {last}")
    return done.stdout


def _resident() -> tuple[int, int]:
    """Resident bytes of this process: all, and private ones."""
    values = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    total, private = (int(values[key].split()[0]) * 1024 for key in ("VmRSS", "RssAnon"))
    return total, private


def _measure_bundle(folder: Path, threads: int) -> MemoryUse:
    import numpy as np

    from headport.bundle import Bundle
    from headport.heads import HeadSessions
    from headport.runner import open_runner
    from headport.session import SessionSettings, library_version
    from headport.session_runner import read_examples
    from headport.source_encoder import example_sources
    from headport.tuned import settings_of

    library_version()  # loads ONNX Runtime itself
    bundle = Bundle.open(folder, verify=False)
    settings = SessionSettings(threads=threads)
    start, private = _resident()
    runner = open_runner(bundle, settings, heads=())
    after_backbone, _ = _resident()
    heads = HeadSessions(bundle, settings_of(bundle.manifest, settings), None)
    loaded, _ = _resident()
    cache = runner.new_cache(1, 4)
    examples = example_sources(bundle.manifest, np.random.default_rng(0))
    if examples:
        read_examples(runner, cache, examples[:1])
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


def _measure_graph(file: Path, threads: int, options: str) -> int:
    import numpy as np

    from headport.session import SessionSettings, library_version, open_session

    library_version()
    start, _ = _resident()
    session = open_session(file, msgspec.json.decode(options), SessionSettings(threads=threads))
    # A weight in a mapped file takes memory when it is first read.
    sizes = {n: [d if isinstance(d, int) else 1 for d in session.shape(n)] for n in session.inputs}
    session.run({n: np.zeros(size, session.dtype(n)) for n, size in sizes.items()}, session.outputs)
    return _resident()[0] - start


if __name__ == "__main__":
    _path, _kind, _threads, *_rest = sys.argv[1:]
    measure: dict[str, Callable[..., MemoryUse | int]]
    measure = {"bundle": _measure_bundle, "graph": _measure_graph}
    sys.stdout.write(
        msgspec.json.encode(measure[_kind](Path(_path), int(_threads), *_rest)).decode()
    )
