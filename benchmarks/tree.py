"""Runs a command and measures it from outside: seconds, and peak memory of its process tree."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

__all__ = ["Measured", "run_command", "run_measured"]

_INTERVAL_S = 0.05


@dataclass(frozen=True)
class Measured:
    """What one command cost."""

    command: str
    exit_code: int
    seconds: float
    peak_rss_bytes: int  # summed over the process tree, sampled every 50 ms
    output: str


def run_measured(*arguments: str) -> Measured:
    """Run `python -m headport …` with these arguments."""
    return run_command([sys.executable, "-m", "headport", *arguments])


def run_command(command: Sequence[str]) -> Measured:
    """Run a program of any kind."""
    started = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        peak = [0]
        stop = threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, peak, stop))
        watcher.start()
        output, _ = process.communicate()
        stop.set()
        watcher.join()
    seconds = time.monotonic() - started
    return Measured(shlex.join(command), process.returncode, seconds, peak[0], output)


def _watch(pid: int, peak: list[int], stop: threading.Event) -> None:
    while not stop.wait(_INTERVAL_S):
        try:
            root = psutil.Process(pid)
            family = [root, *root.children(recursive=True)]
            peak[0] = max(peak[0], sum(_rss(member) for member in family))
        except psutil.NoSuchProcess:
            return


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
