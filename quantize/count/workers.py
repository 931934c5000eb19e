"""Processes that count documents; what they find comes back in the order it was asked for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from headport.errors import UsageError
from headport.quantize.count.counting import Counted, TokenCounter
from headport.quantize.count.held_out import held_out
from headport.quantize.count.near_duplicates import signatures

__all__ = ["BatchCount", "Workers", "open_workers"]

Bool = npt.NDArray[np.bool_]
UInt64 = npt.NDArray[np.uint64]
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class BatchCount:
    """Tokens of a batch: of what is counted, and of what is held out."""

    counted: Counted
    held_out: Counted
    is_held_out: Bool  # [documents]


class Workers:
    """Counts and signs batches of documents.

    Args:
        executor: Runs the functions of this module in processes that were started with `_start`.
        ahead: Batches under way at once, which bounds the memory.
    """

    def __init__(self, executor: Executor, ahead: int) -> None:
        self._executor = executor
        self._ahead = ahead

    def count(
        self, batches: Iterable[_T], texts: Callable[[_T], Sequence[str]], share: float
    ) -> Iterator[tuple[_T, BatchCount]]:
        """Count the texts of each batch; `share` of the documents is held out."""
        return self._in_order(batches, lambda b: self._executor.submit(_count, texts(b), share))

    def sign(
        self, batches: Iterable[_T], texts: Callable[[_T], Sequence[str]]
    ) -> Iterator[tuple[_T, UInt64]]:
        """Keys by which near duplicates of each batch's texts are found, [n, 6]."""
        return self._in_order(batches, lambda b: self._executor.submit(_sign, texts(b)))

    def _in_order(
        self, items: Iterable[_T], submit: Callable[[_T], Future[_R]]
    ) -> Iterator[tuple[_T, _R]]:
        waiting: deque[tuple[_T, Future[_R]]] = deque()
        for item in items:
            waiting.append((item, submit(item)))
            if len(waiting) >= self._ahead:
                yield _finished(*waiting.popleft())
        while waiting:
            yield _finished(*waiting.popleft())


def _finished(item: _T, future: Future[_R]) -> tuple[_T, _R]:
    try:
        return item, future.result()
    except BrokenProcessPool as error:
        raise UsageError(
            "a counting process ended early, as when memory runs out; the same command goes on "
            "where it stopped, --processes asks for fewer"
        ) from error


class _Here(Executor):
    """Runs everything at once in this process."""

    def submit(  # type: ignore[override]
        self, function: Callable[..., _R], /, *arguments: Any
    ) -> Future[_R]:
        future: Future[_R] = Future()
        future.set_result(function(*arguments))
        return future


@contextmanager
def open_workers(source: str, processes: int, *, units: bool = True) -> Iterator[Workers]:
    """Start counting processes; with one, this process counts.

    Args:
        source: Text of tokenizer.json.
        processes: At least 1.
        units: As for `TokenCounter`.
    """
    if processes == 1:
        _start(source, units, watched=False)
        yield Workers(_Here(), 1)
        return
    executor = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), _start, (source, units)
    )
    try:
        yield Workers(executor, 2 * processes)
    finally:
        executor.shutdown(cancel_futures=True)


_counter: TokenCounter


def _start(source: str, units: bool, *, watched: bool = True) -> None:
    global _counter  # noqa: PLW0603 - a worker process has one tokenizer for all its batches
    if watched:
        # One process per CPU already; and nobody ends a worker whose parent was killed.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends us
        threading.Thread(target=_end_with_parent, daemon=True).start()
    _counter = TokenCounter(source, units=units)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _count(texts: Sequence[str], share: float) -> BatchCount:
    aside = held_out(texts, share)
    return BatchCount(
        counted=_counter.count(list(compress(texts, ~aside))),
        held_out=_counter.count(list(compress(texts, aside))),
        is_held_out=aside,
    )


def _sign(texts: Sequence[str]) -> UInt64:
    return signatures(texts)
