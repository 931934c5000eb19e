"""Counting, against the tokenizer's own `encode_batch` on the same documents and one core.

CPU time of the process, in turns over parts of the corpus, so that other work on the machine falls
on both sides alike. The counts must be equal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from headport.errors import ParityError
from headport.progress import say
from headport.quantize.count.batches import batches_of
from headport.quantize.count.corpus import Corpus
from headport.quantize.count.counting import TokenCounter, open_tokenizer, read_tokenizer

__all__ = ["counting_speed"]

_AT_ONCE = 256  # documents per call of encode_batch, which holds all their offsets


def counting_speed(model: Path, corpora: Sequence[Path]) -> float:
    """Print a line per corpus and one for all; returns how many times as fast counting all is.

    Args:
        model: Folder with tokenizer.json.
        corpora: JSON lines or texts.

    Raises:
        ParityError: If the counts differ.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # both on one core
    source = read_tokenizer(model)
    say("| corpus | MB | `encode_batch` MB/s | `encode_batch_fast` MB/s | count MB/s | ratio |")
    say("|---|---|---|---|---|---|")
    parts = [_compare(source, path) for path in corpora]
    megabytes, *seconds = (sum(column) for column in zip(*parts, strict=True))
    return _line("all", megabytes, seconds)


def _line(name: str, megabytes: float, seconds: Sequence[float]) -> float:
    each = " | ".join(f"{megabytes / s:.1f}" for s in seconds)
    ratio = seconds[0] / seconds[2]
    say(f"| {name} | {megabytes:.1f} | {each} | {ratio:.1f} |")
    return ratio


def _compare(source: str, path: Path) -> tuple[float, ...]:
    """Megabytes, and seconds of each of the three ways."""
    tokenizer, size = open_tokenizer(source)
    counter = TokenCounter(source)
    counts = [np.zeros(size, np.int64) for _ in range(3)]
    seconds = [0.0, 0.0, 0.0]
    done = 0

    def plain(encode: Callable[..., list[object]], texts: Sequence[str], into: int) -> None:
        for start in range(0, len(texts), _AT_ONCE):
            for found in encode(texts[start : start + _AT_ONCE], add_special_tokens=False):
                ids = np.array(found.ids, np.int64)  # type: ignore[attr-defined]
                counts[into] += np.bincount(ids, minlength=size)

    for batch in batches_of(Corpus([path]), (0, 0)):
        done += sum(len(text.encode()) for text in batch.texts)
        for way, encode in enumerate((tokenizer.encode_batch, tokenizer.encode_batch_fast)):
            started = time.process_time()
            plain(encode, batch.texts, way)
            seconds[way] += time.process_time() - started
        started = time.process_time()
        counts[2] += counter.count(batch.texts).counts
        seconds[2] += time.process_time() - started
    if not (np.array_equal(counts[0], counts[2]) and np.array_equal(counts[1], counts[2])):
        raise ParityError(f"{path}: the counts differ")
    _line(path.stem, done / 1e6, seconds)
    return done / 1e6, *seconds
