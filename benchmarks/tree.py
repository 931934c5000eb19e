"""Runs a command and measures it from outside: seconds, and peak memory of its process tree."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import psutil

__all__ = ["Measured", "run_measured"]

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
    command = [sys.executable, "-m", "headport", *arguments]
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
    shown = "headport " + " ".join(arguments)
    return Measured(shown, process.returncode, time.monotonic() - started, peak[0], output)


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
