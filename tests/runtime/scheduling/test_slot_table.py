"""Which slot a prompt gets, and how much of it is there already."""

from __future__ import annotations

import numpy as np
import pytest

from headport.runtime.scheduling.slot_table import SlotTable


class Noted:
    """Slots that only count; with what was asked of them."""

    capacity, nbytes = 100, 0

    def __init__(self, count: int, *, divisible: bool = True, movable: bool = True) -> None:
        self.divisible, self.movable = divisible, movable
        self.lengths = np.zeros(count, np.int64)
        self.copies: list[tuple[int, int, int]] = []

    def cut(self, slot: int, length: int) -> None:
        assert length <= self.lengths[slot]
        self.lengths[slot] = length

    def copy(self, source: int, target: int, length: int) -> None:
        assert length <= self.lengths[source]
        self.copies.append((source, target, length))
        self.lengths[target] = length


def run(table: SlotTable, prompt: list[int]) -> tuple[int, int]:
    """Take a slot for a prompt and run all of it; the slot, and how much was reused."""
    slot = table.take(prompt)
    assert slot is not None
    reused = fed = table.begin(slot, prompt)
    while fed < len(prompt):
        chunk = prompt[fed : fed + table.chunk]
        table.slots.lengths[slot] += len(chunk)
        table.keep(slot, chunk)
        fed += len(chunk)
    return slot, reused


A = [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]  # two chunks of four and a rest
B = [1, 1, 1, 1, 5, 5, 5, 5, 6]


def test_whole_chunks_are_taken_over_and_never_the_whole_prompt() -> None:
    table = SlotTable(Noted(1), 1, 4, True)
    for prompt, reused in (
        (A, 0),
        (A, 8),
        (A[:8], 4),  # its last token must be run, or there is nothing to choose from
        (A[:5], 4),
        (B, 4),
        ([9, *A], 0),
        ([1, 1, 1], 0),
    ):
        slot, found = run(table, prompt)
        assert found == reused, prompt
        table.release(slot)


def test_the_slot_that_keeps_most_is_taken_else_the_one_unused_for_longest() -> None:
    slots = Noted(3)
    table = SlotTable(slots, 3, 4, True)
    for prompt in (A, [7] * 9, [8] * 9):
        table.release(run(table, prompt)[0])
    assert run(table, [7] * 9) == (1, 8)
    table.release(1)
    assert run(table, [9] * 9) == (0, 0)  # slot 0 was let go first
    assert slots.copies == []


def test_what_a_running_slot_holds_is_copied() -> None:
    slots = Noted(2)
    table = SlotTable(slots, 2, 4, True)
    first, _ = run(table, A)
    assert run(table, B) == (1 - first, 4)
    assert slots.copies == [(first, 1 - first, 4)]


def test_a_full_table_has_no_slot() -> None:
    table = SlotTable(Noted(1), 1, 4, True)
    assert table.take(A) == 0 and table.take(A) is None
    table.release(0)
    assert table.take(A) == 0


@pytest.mark.parametrize(("slots", "reuse"), [(Noted(2, divisible=False), True), (Noted(2), False)])
def test_without_reuse_each_prompt_is_run(slots: Noted, reuse: bool) -> None:
    table = SlotTable(slots, 2, 4, reuse)
    for _ in range(3):
        slot, reused = run(table, A)
        assert reused == 0
        table.release(slot)


def test_a_slot_of_a_failed_row_keeps_nothing() -> None:
    table = SlotTable(Noted(1), 1, 4, True)
    table.release(run(table, A)[0], sound=False)
    assert table.slots.lengths.tolist() == [0]
    assert run(table, A) == (0, 0)


def test_a_gap_is_closed_with_the_last_row() -> None:
    slots = Noted(4)
    table = SlotTable(slots, 4, 4, True)
    prompts = [[n] * 9 for n in range(4)]
    for prompt in prompts:
        run(table, prompt)
    assert table.pack([0, 1, 2, 3]) is None
    table.release(1)
    assert table.pack([0, 2, 3]) == (3, 1)
    assert slots.copies == [(3, 1, 9)] and slots.lengths[1] == 9
    assert table.pack([0, 1, 2]) is None
    # Its old slot is free, and what it left there is still good.
    table.release(1)
    slot = table.take(prompts[3])
    assert slot in (1, 3) and table.begin(slot, prompts[3]) == 8


def test_rows_that_cannot_move_stay() -> None:
    table = SlotTable(Noted(3, movable=False), 3, 4, True)
    for n in range(3):
        run(table, [n] * 5)
    table.release(1)
    assert table.pack([0, 2]) is None


def test_what_a_slot_no_longer_holds_is_not_taken_over() -> None:
    table = SlotTable(Noted(1), 1, 4, True)
    for prompt, reused in ((A, 0), (B, 4), (A, 4), ([9, *A], 0), (A, 0)):
        slot, found = run(table, prompt)
        assert found == reused, prompt
        table.release(slot)


def test_what_a_gap_held_before_is_not_taken_over() -> None:
    table = SlotTable(Noted(3), 3, 4, True)
    for n in range(3):
        run(table, [n] * 9)
    table.release(1)
    assert table.pack([0, 2]) == (2, 1)
    assert run(table, [1] * 9) == (2, 0)
