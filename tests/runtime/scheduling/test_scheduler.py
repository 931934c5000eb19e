"""One generator and many threads."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headport.errors import (
    CancelledRequestError,
    ClosedError,
    DeadlineError,
    OverloadedError,
    RequestError,
)
from headport.runtime import Generator

NEW = {"max_new_tokens": 6, "eos_token_id": ()}


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "headport"]


class Gate:
    """A listener that holds the scheduler at the first token until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, place: int, token: Any) -> None:
        self.reached.set()
        assert self.opened.wait(30)


def test_64_threads_get_what_one_gets(tiny_lowered: Path) -> None:
    def ask(generator: Generator, n: int) -> Any:
        more = {"temperature": 1.0 + n % 3 / 10, "top_k": n % 7 * 10, "seed": n} if n % 4 else {}
        prompt = [(n * 37 + i * 11) % 257 for i in range(1 + n % 9)]
        return generator.generate([prompt], max_new_tokens=4 + n % 5, eos_token_id=(), **more)

    with Generator(tiny_lowered, threads=1, slots=8) as generator:
        one_by_one = [ask(generator, n) for n in range(64)]
        with ThreadPoolExecutor(64) as pool:
            together = list(pool.map(lambda n: ask(generator, n), range(64)))
        assert together == one_by_one
        stats = generator.stats
        assert stats.most_rows == 8 and stats.requests == 128
        assert stats.steps < 2 * 0.8 * sum(3 + n % 5 for n in range(64))


def test_streams_run_side_by_side(make: Any) -> None:
    generator = make()
    streams = [generator.stream(p, **NEW) for p in ("ab", "cd")]
    taken = [next(streams[n % 2]) for n in range(12)]  # in turn
    expected = [make().generate(p, **NEW)[0] for p in ("ab", "cd")]
    for n, stream in enumerate(streams):
        assert [t.token_id for t in taken[n::2]] == expected[n].token_ids
        assert stream.generation == expected[n]
        with pytest.raises(StopIteration):
            next(stream)


def test_a_timeout_counts_the_time_that_a_request_waits(make: Any) -> None:
    generator, gate = make(options={"slots": 1}), Gate()
    first = generator.submit("ab", listener=gate, **NEW)
    assert gate.reached.wait(30)
    second = generator.submit("cd", timeout=0.05, **NEW)
    time.sleep(0.1)
    gate.opened.set()
    with pytest.raises(DeadlineError):
        second.result()
    assert first.result() == make().generate("ab", **NEW)


def test_too_many_waiting_rows_are_refused(make: Any) -> None:
    generator, gate = make(options={"slots": 1, "max_waiting": 2}), Gate()
    first = generator.submit("ab", listener=gate, **NEW)
    assert gate.reached.wait(30)
    others = [generator.submit("cd", **NEW) for _ in range(2)]
    with pytest.raises(OverloadedError, match="2 rows and jobs wait and the limit is 2"):
        generator.generate("ef", **NEW)
    gate.opened.set()
    for submission in (first, *others):
        submission.result()
    assert generator.generate("ef", **NEW) and generator.stats.refused == 1


def test_a_stream_that_nobody_holds_ends(make: Any) -> None:
    generator = make()
    for leave in ("close", "with", "drop"):
        gate = Gate()
        busy = generator.submit("ab", listener=gate, **NEW)
        assert gate.reached.wait(30)
        stream: Any = generator.stream("cd", **NEW)
        submission = stream._submission
        if leave == "close":
            stream.close()
        elif leave == "with":
            with stream:
                pass
        del stream
        gate.opened.set()
        with pytest.raises(CancelledRequestError):
            submission.result()
        assert busy.result() == make().generate("ab", **NEW)


def test_closing_ends_what_runs_and_refuses_more(make: Any) -> None:
    generator, gate = make(options={"slots": 1}), Gate()
    running = generator.submit("ab", listener=gate, **NEW)
    waiting = generator.submit("cd", **NEW)
    assert gate.reached.wait(30)
    closer = threading.Thread(target=generator.close)
    closer.start()
    while not generator.closed:
        time.sleep(0.001)
    gate.opened.set()
    closer.join(30)
    for submission in (running, waiting):
        with pytest.raises(ClosedError, match="closed before the request was done"):
            submission.result()
    with pytest.raises(ClosedError, match="make a new one"):
        generator.generate("ef", **NEW)
    assert generator.stats.requests == 2
    generator.close()


def test_a_generator_that_nobody_holds_ends_its_thread(make: Any) -> None:
    before = set(threads())
    generator = make()
    stream = generator.stream("ab", **NEW)
    [thread] = set(threads()) - before
    del generator
    gc.collect()
    assert len(list(stream)) == 6  # a stream keeps it alive
    del stream
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_a_caller_that_is_interrupted_cancels(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, gate = make(), Gate()
    submission = generator.submit("ab", listener=gate, **NEW)
    assert gate.reached.wait(30)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(submission.future, "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            submission.result()
    gate.opened.set()
    with pytest.raises(CancelledRequestError):
        submission.result()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_is_told_that_its_threads_are_gone(make: Any) -> None:
    generator = make()
    generator.generate("ab", **NEW)
    child = os.fork()
    if child == 0:  # must never return into pytest
        signal.alarm(20)
        code = 1
        try:
            generator.stats.requests  # noqa: B018 - must not wait for a thread
            generator.generate("ab", **NEW)
        except ClosedError as error:
            code = 0 if "after the fork" in str(error) else 2
            generator.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(generator.generate("ab", **NEW)[0].token_ids) == 6


@pytest.mark.parametrize("name", ["allowed", "process_scores", "listener"])
def test_a_callback_that_exits_ends_its_own_request(make: Any, name: str) -> None:
    def leave(*_: Any) -> None:
        sys.exit("enough")

    generator = make()
    with pytest.raises((RequestError, SystemExit), match="enough"):
        generator.submit("ab", **NEW, **{name: leave}).result()
    assert len(generator.generate("ab", **NEW)[0].token_ids) == 6


def test_waiting_for_oneself_is_refused(make: Any) -> None:
    generator = make()
    waits = (
        lambda: generator.logits([1, 2]),
        lambda: generator.generate("cd", **NEW),
        lambda: next(generator.stream("cd", **NEW)),
    )
    for wait in waits:
        submission = generator.submit("ab", listener=lambda *_, wait=wait: wait(), **NEW)
        with pytest.raises(RequestError, match="must not wait for its own generator"):
            submission.result()
    assert generator.generate("cd", **NEW)[0].token_ids
    counts = []
    generator.submit(
        "ab", listener=lambda place, token: counts.append(generator.stats.requests), **NEW
    ).result()
    assert len(set(counts)) == 1 and len(counts) == 6


def test_a_question_that_fails_is_answered_and_the_thread_goes_on(make: Any) -> None:
    def fail() -> None:
        raise MemoryError("no room for a copy")

    generator, gate = make(), Gate()
    submission = generator.submit("ab", listener=gate, **NEW)
    assert gate.reached.wait(30)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(generator._scheduler.between_steps, fail)
        time.sleep(0.05)  # so that it is asked while the step lasts
        gate.opened.set()
        with pytest.raises(MemoryError, match="no room"):
            asked.result(30)
    assert len(submission.result()[0].token_ids) == 6
