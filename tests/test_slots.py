"""Slots: rows that start, end and restart apart from each other answer as if alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.lowering import Options, lower
from headport.runner import Runner, open_runner
from headport.session import Binding, SessionSettings
from headport.slots import SeparateSlots, Slots, open_slots
from tests.recurrent_models import recurrent_bundle

IDS = np.random.default_rng(0).integers(0, 257, (4, 40))
CAPACITY = 30


@pytest.fixture(params=["tiny_bundle", "tiny_lowered"], scope="module")
def runner(request: pytest.FixtureRequest) -> Runner:
    bundle = Bundle.open(request.getfixturevalue(request.param))
    return open_runner(bundle, SessionSettings(threads=1))


Make = Callable[..., Slots]


@pytest.fixture(params=["own", "separate"])
def make(request: pytest.FixtureRequest, runner: Runner) -> Make:
    def build(count: int = 4, capacity: int = CAPACITY) -> Slots:
        if request.param == "separate":
            return SeparateSlots(runner, count, capacity)
        return open_slots(runner, count, capacity)

    return build


def alone(runner: Runner, row: int, count: int) -> np.ndarray:
    cache = runner.new_cache(1, count)
    return runner.forward(cache, IDS[row : row + 1, :count], np.array([count]))[0]


def feed(slots: Slots, rows: dict[int, tuple[int, int]]) -> dict[int, np.ndarray]:
    """`{slot: (row of IDS, new tokens)}` → hidden states by slot; goes on where a slot stands."""
    chosen = sorted(rows)
    width = max(new for _, new in rows.values())
    ids = np.full((len(chosen), width), -1)  # whatever stands behind a row is not read
    for n, slot in enumerate(chosen):
        row, new = rows[slot]
        held = int(slots.lengths[slot])
        ids[n, :new] = IDS[row, held : held + new]
    lengths = np.array([rows[slot][1] for slot in chosen])
    hidden = slots.forward(chosen, ids, lengths)
    return {slot: hidden[n, : rows[slot][1]] for n, slot in enumerate(chosen)}


def test_rows_join_leave_and_restart_apart(make: Make, runner: Runner) -> None:
    slots, found = make(), {}

    def step(**rows: tuple[int, int]) -> None:
        numbered = {int(slot[1:]): each for slot, each in rows.items()}
        for slot, states in feed(slots, numbered).items():
            found.setdefault(slot, []).append(states)

    step(s1=(0, 7))  # a prompt alone, not in the first slot
    step(s1=(0, 1))
    step(s3=(1, 5))  # another joins, with a gap between them
    step(s1=(0, 1), s3=(1, 1))
    step(s0=(2, 3), s1=(0, 3), s3=(1, 2))  # several tokens at once
    assert slots.lengths.tolist() == [3, 12, 0, 8]
    for slot, row in ((0, 2), (1, 0), (3, 1)):
        states = np.concatenate(found.pop(slot))
        assert np.abs(states - alone(runner, row, len(states))).max() < 2e-5
    slots.cut(1, 0)
    step(s1=(3, 6))  # a new sequence where another was
    step(s0=(2, 1), s1=(3, 1))
    assert np.abs(np.concatenate(found[1]) - alone(runner, 3, 7)).max() < 2e-5
    assert np.abs(np.concatenate(found[0]) - alone(runner, 2, 4)[3:]).max() < 2e-5


def test_a_slot_can_be_filled(make: Make, runner: Runner) -> None:
    slots = make(2, 12)
    feed(slots, {0: (0, 11)})
    feed(slots, {0: (0, 1), 1: (1, 1)})
    last = feed(slots, {1: (1, 11)})[1]
    assert slots.lengths.tolist() == [12, 12]
    assert np.abs(last - alone(runner, 1, 12)[1:]).max() < 2e-5


def test_what_is_kept_or_copied_is_what_was_there_bit_for_bit(runner: Runner) -> None:
    slots = open_slots(runner, 3, CAPACITY)
    assert slots.divisible and slots.movable and slots.nbytes > 0
    feed(slots, {0: (0, 8)})
    cold = feed(slots, {0: (0, 8)})[0]
    feed(slots, {0: (0, 5)})
    slots.cut(0, 8)
    assert (feed(slots, {0: (0, 8)})[0] == cold).all()
    slots.copy(0, 2, 8)
    assert slots.lengths.tolist() == [16, 0, 8]
    assert (feed(slots, {2: (0, 8)})[2] == cold).all()
    slots.copy(2, 1, 16)
    step = feed(slots, {1: (0, 1)})[1]
    assert (feed(slots, {2: (0, 1)})[2] == step).all()


@pytest.mark.parametrize("target", ["portable", "ort-cpu"])
def test_states_start_go_and_stay_with_their_row(
    target: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, bundle = recurrent_bundle("lfm2", tmp_path_factory)
    if target != "portable":
        bundle = lower(Options(bundle=bundle.path, output=tmp_path / "b", target=target))
    runner = open_runner(bundle, SessionSettings(threads=1))
    slots = open_slots(runner, 4, CAPACITY)
    assert not slots.divisible and slots.movable
    owner = {0: 0, 1: 1, 2: 2}  # slot → row of IDS

    def check(**news: int) -> None:
        new = {int(slot[1:]): count for slot, count in news.items()}
        before = slots.lengths.copy()
        for slot, states in feed(slots, {s: (owner[s], n) for s, n in new.items()}).items():
            held, stop = int(before[slot]), int(before[slot]) + new[slot]
            expected = alone(runner, owner[slot], stop)[held:]
            assert np.abs(states - expected).max() < 2e-4 * np.abs(expected).max(), (slot, held)

    check(s0=5)
    check(s1=4)
    check(s2=4)
    check(s0=1, s2=1)  # the one between them waits
    check(s1=1)
    slots.copy(2, 3, 5)
    owner[3] = 2
    check(s3=1)
    check(s0=1, s1=1, s2=1, s3=1)
    check(s0=1, s1=1, s2=1, s3=1)
    slots.cut(0, 0)
    owner[0] = 3  # a new sequence where another was
    check(s0=6)
    check(s0=1, s1=1, s2=1, s3=1)
    with pytest.raises(AssertionError):
        slots.cut(1, 3)


def test_slots_of_their_own_can_be_dropped_only(runner: Runner) -> None:
    slots = SeparateSlots(runner, 2, CAPACITY)
    feed(slots, {0: (0, 8)})
    assert not slots.divisible and not slots.movable
    with pytest.raises(AssertionError):
        slots.cut(0, 3)
    slots.cut(0, 0)
    assert slots.lengths.tolist() == [0, 0]


def test_what_another_sequence_left_is_never_read(tiny_lowered: Path) -> None:
    runner = open_runner(Bundle.open(tiny_lowered), SessionSettings(threads=1))
    slots: Any = open_slots(runner, 2, CAPACITY)
    for buffer in slots._cache.buffers.values():
        buffer[:] = np.nan
    feed(slots, {0: (0, 4), 1: (1, 2)})
    slots.cut(0, 2)
    states = feed(slots, {0: (0, 3), 1: (1, 1)})
    assert np.abs(states[0] - alone(runner, 0, 5)[2:]).max() < 2e-5
    assert np.abs(states[1] - alone(runner, 1, 3)[2:]).max() < 2e-5


def test_steps_of_a_range_are_bound_once(
    tiny_lowered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_runner(Bundle.open(tiny_lowered), SessionSettings(threads=1))
    slots = open_slots(runner, 3, CAPACITY)
    feed(slots, {0: (0, 2), 1: (1, 2), 2: (2, 2)})
    feed(slots, {1: (1, 1), 2: (2, 1)})
    calls: list[str] = []
    monkeypatch.setattr(Binding, "input", lambda self, name, buffer: calls.append(name))
    for _ in range(5):
        feed(slots, {1: (1, 1), 2: (2, 1)})
    assert calls == []
