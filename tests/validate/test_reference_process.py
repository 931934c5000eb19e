"""The reference process as a process: it answers, it dies loudly, it never stays behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.errors import CheckpointError, ReferenceProcessError
from headport.validate.reference_process import ReferenceProcess


@pytest.fixture(scope="module")
def process(tiny_llama: Path) -> Iterator[ReferenceProcess]:
    with ReferenceProcess(str(tiny_llama)) as running:
        yield running


def ids(*values: int) -> Any:
    return np.array(values, np.int64)


def test_windows_asked_ahead_are_answered_in_order(
    process: ReferenceProcess, tiny_llama: Path, reference_of: Any
) -> None:
    expected = reference_of(tiny_llama)
    windows = [ids(5, 3, 8), ids(7), ids(1, 2, 3, 4, 5)]
    for window in windows:
        process.ask_score(window)
        expected.ask_score(window)
    for window in windows:
        blocks = [(b.start, b.logits.copy(), b.near_tie_bound) for b in process.read_score(2)]
        assert [start for start, _, _ in blocks] == list(range(0, len(window), 2))
        logits = np.concatenate([found for _, found, _ in blocks])
        (whole,) = expected.read_score(99)
        np.testing.assert_allclose(logits, whole.logits, atol=1e-5)
        bounds = np.concatenate([bound for _, _, bound in blocks])
        np.testing.assert_allclose(bounds, whole.near_tie_bound, rtol=1e-5)
    assert process.seconds > 0


def test_token_ids_and_facts(process: ReferenceProcess) -> None:
    assert process.ready() is process.ready()
    assert process.ready().facts.vocab_size == 257
    assert process.encode(["", "aé"])[0] == ()


def test_greedy(process: ReferenceProcess) -> None:
    process.ask_greedy(np.array([[5, 3], [8, 1]]), 3)
    found = process.read_greedy()
    assert [len(row) for row in found.token_ids] == [3, 3]


def test_layers_read_through_the_head(
    process: ReferenceProcess, tiny_llama: Path, reference_of: Any
) -> None:
    far, near = (side.lens(ids(5, 3, 8)) for side in (process, reference_of(tiny_llama)))
    assert far.choices == near.choices and len(far.choices) == 3
    np.testing.assert_allclose(far.of_final, near.of_final, atol=1e-5)


def test_a_request_to_a_process_that_failed_gives_its_reason(tmp_path: Path) -> None:
    with ReferenceProcess(str(tmp_path / "none")) as running:
        running._process.wait()
        with pytest.raises(CheckpointError, match="nothing is there"):
            running.ask_score(ids(1))


def test_a_killed_process_is_reported_and_gone(tiny_llama: Path) -> None:
    with ReferenceProcess(str(tiny_llama)) as running:
        pid = running._process.pid
        running.ready()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ReferenceProcessError, match=r"signal SIGKILL, as when memory runs out"):
            running.ask_score(ids(1))
            list(running.read_score(1))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_crash_tells_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A module of this name in front of the real one stands for any fault while loading.
    (tmp_path / "torch.py").write_text("raise RuntimeError('no such device')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        ReferenceProcess("anything") as running,
        pytest.raises(
            ReferenceProcessError, match=r"exit code 1\); its last words: .*no such device"
        ),
    ):
        running.ready()


def test_leaving_ends_the_process_in_the_middle_of_its_work(tiny_llama: Path) -> None:
    with ReferenceProcess(str(tiny_llama)) as running:
        pid = running._process.pid
        for _ in range(20):
            running.ask_score(ids(*range(60)))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
