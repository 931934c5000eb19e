"""A large corpus: constant memory, and the same counts after a kill.

The corpus repeats the domains' documents with some words replaced, so that it goes on bringing
words that were not seen before. One run is watched to its end; another is killed half-way, with
its processes, and started again.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import psutil

from headport.errors import ParityError
from headport.progress import say
from headport.quantize.count.corpus import Corpus
from headport.quantize.count.table import read_counts

__all__ = ["big_corpus"]

_REPLACED = 0.02  # of the words
_WATCH_S = 0.25


def big_corpus(model: Path, corpora: Sequence[Path], work: Path, size_bytes: int) -> None:
    """Make the corpus, count it twice, print what it took.

    Raises:
        ParityError: If the counts of the two runs differ.
    """
    corpus = work / "big.jsonl"
    _write(corpus, corpora, size_bytes)
    whole, killed = work / "whole.parquet", work / "killed.parquet"
    for table in (whole, killed):
        table.unlink(missing_ok=True)
    started = time.monotonic()
    peaks = _watch(_start(model, corpus, whole))
    seconds = time.monotonic() - started
    found = read_counts(whole)
    quarters = " / ".join(f"{max(part) / 1e6:.0f}" for part in np.array_split(peaks, 4))
    say(
        f"{found.record.bytes / 1e9:.2f} GB of text, {found.record.documents} documents, "
        f"{found.record.tokens} tokens in {seconds:.0f} s "
        f"({found.record.bytes / 1e6 / seconds:.1f} MB/s, all processes); peak memory of all "
        f"processes in the four quarters of the run: {quarters} MB"
    )
    process = _start(model, corpus, killed)
    _kill_half_way(process, killed, seconds)
    process = _start(model, corpus, killed)
    if process.wait():
        raise ParityError("the second run did not finish")
    if not np.array_equal(read_counts(killed).counts, found.counts):
        raise ParityError("the counts of the interrupted run differ")
    say("killed half-way and started again: the same counts")


def _write(corpus: Path, corpora: Sequence[Path], size_bytes: int) -> None:
    texts = [d.text or "" for path in corpora for d in Corpus([path]).documents()]
    draw, written = random.Random(0), 0
    with corpus.open("wb") as stream:
        while written < size_bytes:
            for text in _changed(texts, draw):
                line = msgspec.json.encode({"text": text}) + b"\n"
                stream.write(line)
                written += len(line)
                if written >= size_bytes:
                    break


def _changed(texts: Sequence[str], draw: random.Random) -> Iterator[str]:
    for text in texts:
        words = text.split(" ")
        for _ in range(int(_REPLACED * len(words)) + 1):
            place = draw.randrange(len(words))
            words[place] = "".join(draw.choices("aeioubcdfghklmnprst", k=draw.randint(3, 9)))
        yield " ".join(words)


def _start(model: Path, corpus: Path, output: Path) -> subprocess.Popen[bytes]:
    verb = ["count", str(model), "--corpus", str(corpus), "-o", str(output)]
    return subprocess.Popen([sys.executable, "-m", "headport", *verb, "--quiet"])


def _watch(process: subprocess.Popen[bytes]) -> list[int]:
    """Memory of a process and its children over time, bytes."""
    peaks = []
    while process.poll() is None:
        peaks.append(_memory(process.pid))
        time.sleep(_WATCH_S)
    if process.returncode:
        raise ParityError(f"`headport count` ended with {process.returncode}")
    return peaks


def _memory(pid: int) -> int:
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
        return sum(each.memory_info().rss for each in family)
    except psutil.Error:
        return 0


def _kill_half_way(process: subprocess.Popen[bytes], output: Path, seconds: float) -> None:
    state = output.with_name(f".{output.name}.unfinished")
    end = time.monotonic() + seconds / 2
    while time.monotonic() < end or not state.exists():
        if process.poll() is not None:
            raise ParityError("the run was over before it could be killed; use a larger corpus")
        time.sleep(_WATCH_S)
    process.kill()
    process.wait()
