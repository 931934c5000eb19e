"""Requests in one worker, step by step and without a thread: who runs when, and who is harmed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headport.errors import (
    CancelledRequestError,
    DeadlineError,
    NonFiniteError,
    RequestError,
)
from headport.runtime import Generator
from headport.runtime.scheduling import tickets

NEW = {"max_new_tokens": 6, "eos_token_id": ()}
SETS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 9, "seed": 5},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01, "seed": 5},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
)


class Manual:
    """A generator whose steps are taken by the test."""

    def __init__(self, generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.generator = generator
        self.runner: Any = generator._runner
        self._scheduler = generator._scheduler
        monkeypatch.setattr(self._scheduler, "_start", lambda: None)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._scheduler._take()
            self._scheduler._worker.step()

    def finish(self) -> None:
        self.step()
        while self._scheduler._worker.busy:
            self.step()

    def submit(self, prompt: Any, **options: Any) -> Any:
        return self.generator.submit(prompt, **(NEW | options))


@pytest.fixture
def manual(make: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda **options: Manual(make(options=options), monkeypatch)


def alone(make: Any, prompt: Any, **options: Any) -> Any:
    return make().generate(prompt, **(NEW | options))


def test_requests_of_all_kinds_join_and_leave_and_get_what_they_get_alone(
    make: Any, manual: Any
) -> None:
    worker = manual(slots=3)
    submitted = []
    for n, more in enumerate(SETS * 2):
        prompt, length = f"prompt {n}", 3 + n % 4
        submitted.append((worker.submit(prompt, **more | {"max_new_tokens": length}), prompt, more))
        worker.step()
    worker.finish()
    for n, (submission, prompt, more) in enumerate(submitted):
        length = 3 + n % 4
        assert submission.result() == alone(make, prompt, **more | {"max_new_tokens": length})
    stats = worker.generator.stats
    assert stats.most_rows == 3 and stats.most_waiting > 1
    assert stats.new_tokens == sum(3 + n % 4 for n in range(10))
    widest = max(len(step) for step in worker.runner.steps)
    assert widest == 3


def test_rows_close_the_gap_that_one_leaves(make: Any, manual: Any) -> None:
    worker = manual()
    lengths = (6, 2, 6, 9)
    rows = [worker.submit(f"row {n}", max_new_tokens=length) for n, length in enumerate(lengths)]
    worker.finish()
    for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        assert row.result() == alone(make, f"row {n}", max_new_tokens=length)
    assert [sorted(step) for step in worker.runner.steps[4:]] == (
        [[0, 1, 2, 3]] + [[0, 1, 2]] * 4 + [[1]] * 3
    )
    assert worker.generator.stats.moved_rows == 1


def test_a_long_prompt_holds_the_others_up_by_a_chunk_at_a_time(manual: Any) -> None:
    worker = manual(prefill_chunk=8)
    first = worker.submit("ab", max_new_tokens=20)
    worker.step()
    worker.submit("x" * 40, max_new_tokens=2)
    before = len(worker.runner.steps)
    worker.step(5)
    # In turn a chunk of the long one and a token for the first; it joins after its last chunk.
    assert worker.runner.steps[before:] == [{1: 8}, {0: 1}] * 5
    worker.step()
    assert worker.runner.steps[-1] == {0: 1, 1: 1}
    worker.finish()
    assert len(first.result()[0].token_ids) == 20


def test_a_prompt_gets_logits_for_its_last_token_only(
    manual: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, rows = manual(prefill_chunk=8), []
    head = worker.runner.head

    def counted(hidden_states: np.ndarray, *others: Any, **named: Any) -> Any:
        rows.append(hidden_states[:, 1].tolist())  # positions
        return head(hidden_states, *others, **named)

    monkeypatch.setattr(worker.runner, "head", counted)
    worker.submit("x" * 40, max_new_tokens=3)
    worker.finish()
    assert worker.runner.steps == [{0: 8}] * 5 + [{0: 1}] * 2
    assert rows == [[39], [40], [41]]


def test_short_prompts_share_a_turn(manual: Any) -> None:
    worker = manual(prefill_chunk=8)
    worker.submit(["abc", "abcd", "abcde", "abcdef"])
    worker.step()
    assert worker.runner.steps == [{0: 3}, {1: 4}, {2: 5}]  # the first two leave room for a bit
    worker.step()
    assert worker.runner.steps[3:] == [{3: 6}, {0: 1, 1: 1, 2: 1}]


def test_prompts_that_begin_alike_are_run_once(make: Any, manual: Any) -> None:
    worker = manual(prefill_chunk=4)
    for prompt in ("abcdefgh", "abcdefghij", "abcdxyz"):
        submission = worker.submit(prompt)
        worker.finish()
        assert submission.result() == alone(make, prompt)
    stats = worker.generator.stats
    assert (stats.reused_tokens, stats.prompt_tokens) == (8 + 4, 8 + 2 + 3)
    both = worker.submit(["abcdefghij", "abcdefghkl"], n=2, temperature=1.0, seed=1)
    worker.finish()
    assert both.result()[1] == alone(make, "abcdefghij", n=2, temperature=1.0, seed=1)[1]
    assert (
        worker.generator.stats.reused_tokens == 12 + 4 * 8
    )  # the third left the first's as it was


def test_a_cancelled_request_ends_and_leaves_the_others(make: Any, manual: Any) -> None:
    worker = manual(slots=1)
    running, waiting, other = (worker.submit(p) for p in ("ab", "cd", "ef"))
    worker.step(2)
    running.cancel()
    waiting.cancel()
    worker.finish()
    for submission in (running, waiting):
        with pytest.raises(CancelledRequestError):
            submission.result()
    assert other.result() == alone(make, "ef")
    assert worker.generator.stats.cancelled == 2


def test_a_late_request_ends_and_leaves_the_others(
    make: Any, manual: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(tickets.time, "monotonic", lambda: now)
    worker = manual()
    late, other = worker.submit("ab", timeout=5.0), worker.submit("cd", timeout=6.0)
    worker.step(2)
    now = 105.0
    worker.finish()
    with pytest.raises(DeadlineError, match=r"not done after 5\.0 seconds"):
        late.result()
    assert other.result() == alone(make, "cd")
    assert worker.generator.stats.timed_out == 1


def test_a_broken_row_ends_its_own_request(make: Any, table: Any, monkeypatch: Any) -> None:
    broken = table.copy()
    broken[7] = np.nan  # logits after token 7
    worker = Manual(make(broken), monkeypatch)
    bad, good = worker.submit([[5], [7]]), worker.submit([[5], [6]])
    worker.finish()
    with pytest.raises(NonFiniteError, match="row 1, step 0"):
        bad.result()
    assert good.result() == alone(make, [[5], [6]])
    assert worker.generator.stats.failed == 1
    again = worker.submit([[5]])
    worker.finish()
    assert again.result() == good.result()[:1]


def test_a_listener_that_fails_ends_its_own_request(make: Any, manual: Any) -> None:
    worker = manual()

    def listener(place: int, token: Any) -> None:
        if token.step == 2:
            raise KeyError("the listener's own fault")

    bad = worker.submit("ab", listener=listener)
    good = worker.submit("cd")
    worker.finish()
    with pytest.raises(KeyError, match="own fault"):
        bad.result()
    assert good.result() == alone(make, "cd")


def test_what_a_failed_row_has_left_is_not_taken_over(make: Any, manual: Any) -> None:
    worker = manual(prefill_chunk=4)
    bad = worker.submit("abcdefgh", listener=lambda place, token: 1 / 0)
    worker.finish()
    with pytest.raises(ZeroDivisionError):
        bad.result()
    good = worker.submit("abcdefgh")
    worker.finish()
    assert good.result() == alone(make, "abcdefgh")
    assert worker.generator.stats.reused_tokens == 0


def test_a_run_that_fails_ends_the_rows_in_it(make: Any, manual: Any, monkeypatch: Any) -> None:
    worker = manual(slots=2)
    both = [worker.submit("ab"), worker.submit("cd")]
    later = worker.submit("ef")
    worker.step(2)
    hidden = worker.runner.hidden
    monkeypatch.setattr(worker.runner, "hidden", lambda *given: 1 / 0)
    worker.step()
    monkeypatch.setattr(worker.runner, "hidden", hidden)
    worker.finish()
    for submission in both:
        with pytest.raises(ZeroDivisionError):
            submission.result()
    assert later.result() == alone(make, "ef")


def test_no_memory_for_the_slots_is_told_and_tried_again(make: Any, manual: Any) -> None:
    worker = manual()
    made = worker.runner.new_slots
    worker._scheduler._worker._open_slots = lambda: bytearray(1 << 62)
    first = worker.submit("ab")
    worker.finish()
    with pytest.raises((MemoryError, OverflowError)):
        first.result()
    worker._scheduler._worker._open_slots = lambda: made(2, 64)
    second = worker.submit("ab")
    worker.finish()
    assert second.result() == alone(make, "ab")


def test_scores_and_logits_are_taken_between_steps(make: Any, manual: Any) -> None:
    worker = manual(prefill_chunk=4)
    submission = worker.submit("ab", max_new_tokens=12)
    worker.step()
    scheduler, scorer = worker._scheduler, worker.generator._scorer
    ids = list(range(10))
    ticket = scheduler.submit_job(scorer.logits(ids, "lm"), None)
    before = worker.generator.stats.new_tokens
    worker.step(4)  # three chunks and the head
    assert worker.generator.stats.new_tokens - before == 4
    worker.finish()
    assert (ticket.result() == make().logits(ids)).all()
    assert submission.result() == alone(make, "ab", max_new_tokens=12)


def test_beams_are_searched_between_steps(make: Any, manual: Any) -> None:
    worker = manual()
    beams = worker.submit(["ab", "cd"], num_beams=3, n=2)
    other = worker.submit("ef", temperature=1.0, seed=2)
    worker.finish()
    found = beams.result()
    assert [(r.index, r.sample) for r in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[0].score >= found[1].score
    assert other.result() == alone(make, "ef", temperature=1.0, seed=2)
    with pytest.raises(RequestError, match="beams have no tokens before their end"):
        worker.submit("ab", num_beams=3, listener=print)
