"""Which mix is taken, with drifts given by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from headport.quantize.mix.choosing import (
    Budget,
    GroupCost,
    cheapest_first,
    first_within,
    longest_within,
)
from headport.quantize.mix.groups import Group
from headport.quantize.mix.measuring import Bench, choose
from headport.quantize.mix.reading import Drift


def _drift(kl: float) -> Drift:
    return Drift(100, kl, kl / 10, 1 + kl, kl / 10, 0.9)


def _cost(label: str, saved: int, kl: float) -> GroupCost:
    return GroupCost(Group(label, (), (label,), (label,)), 100, 100 + saved, _drift(kl))


COSTS = [
    _cost("dear", 10, 4e-1),
    _cost("cheap", 40, 1e-3),
    _cost("small but cheap", 1, 1e-4),
    _cost("middle", 100, 1e-2),
]


class _Bench:
    """Mixes cost twice the sum of their parts, and on held-out text more than that."""

    def __init__(self, held_out: float = 1.0) -> None:
        self.factor = {False: 2.0, True: 2.0 * held_out}
        self.asked: list[tuple[int, bool]] = []

    def costs(self) -> list[GroupCost]:
        return cheapest_first(COSTS)

    def drift(self, costs: Sequence[GroupCost], count: int, *, held_out: bool) -> Drift:
        self.asked.append((count, held_out))
        kl = 1e-5 + sum(cost.alone.kl_mean for cost in costs[:count])
        return _drift(self.factor[held_out] * kl)

    @property
    def held_out_mixes(self) -> int:
        return len({count for count, held_out in self.asked if held_out})


def _choose(bench: _Bench, of: str, limit: float) -> Any:
    return choose(cast("Bench", bench), Budget(of, limit))  # type: ignore[arg-type]


def test_groups_are_ordered_by_kl_per_byte() -> None:
    names = [cost.group.kind for cost in cheapest_first(COSTS)]
    assert names == ["cheap", "small but cheap", "middle", "dear"]


@pytest.mark.parametrize("last", range(-1, 8))
def test_bisection_finds_the_longest(last: int) -> None:
    asked: list[int] = []

    def within(n: int) -> bool:
        asked.append(n)
        return n <= last

    assert longest_within(7, within) == (None if last < 0 else last)
    assert len(asked) <= 4 and len(set(asked)) == len(asked)
    assert first_within(7, lambda n: n >= last) == max(last, 0)
    assert first_within(3, lambda n: n > 3) is None


@pytest.mark.parametrize(
    ("of", "limit", "groups"),
    # 2 · (1e-5 + the first n of 1e-3, 1e-4, 1e-2, 4e-1)
    [("kl", 2.3e-3, 2), ("kl", 2.1e-3, 1), ("ppl", 1.023, 3), ("kl", 1.0, 4), ("kl", 1e-4, 0)],
)
def test_the_measured_whole_decides_and_not_the_sum(of: str, limit: float, groups: int) -> None:
    found = _choose(_Bench(), of, limit)
    assert found.met and found.chosen.groups == groups
    parts = 2e-5 + sum((1e-3, 1e-4, 1e-2, 4e-1)[:groups])
    assert found.sum_of_parts == pytest.approx(parts)
    assert found.chosen.nbytes == 551 - sum((40, 1, 100, 10)[:groups])
    assert found.held_out_mixes == 1
    assert (found.all_small.groups, found.all_large.groups) == (4, 0)


def test_held_out_text_can_shorten_a_mix() -> None:
    found = _choose(_Bench(held_out=10), "kl", 2.3e-2)
    assert found.met and found.chosen.groups == 2  # the text alone would allow three
    assert found.held_out_mixes > 1
    assert found.chosen.held_out.kl_mean <= 2.3e-2 < found.all_small.held_out.kl_mean


@pytest.mark.parametrize("held_out", [1.0, 1e4])
def test_a_budget_that_cannot_be_met_gives_the_nearest(held_out: float) -> None:
    found = _choose(_Bench(held_out), "kl", 1e-6 if held_out == 1 else 1e-2)
    assert not found.met and found.chosen.groups == 0
    too_small = _choose(_Bench(), "bytes", 399)
    assert not too_small.met and too_small.chosen.groups == 4


@pytest.mark.parametrize(("limit", "groups"), [(551, 0), (550, 1), (511, 1), (510, 2), (400, 4)])
def test_bytes_need_no_more_than_the_fewest_groups(limit: int, groups: int) -> None:
    found = _choose(bench := _Bench(), "bytes", limit)
    assert found.met and found.chosen.groups == groups and found.chosen.nbytes <= limit
    assert found.held_out_mixes == 0 and bench.held_out_mixes >= 2
