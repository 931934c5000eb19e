"""Groups of matrices, and patterns that fit these and no others."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from headport.quantize.mix.groups import find_groups, number_patterns


def _fitting(patterns: list[str], numbers: range) -> list[int]:
    return [n for n in numbers if any(fnmatchcase(str(n), p) for p in patterns)]


def test_number_patterns_fit_the_interval_alone() -> None:
    for last in range(34):
        for first in range(last + 1):
            patterns = number_patterns(first, last)
            assert _fitting(patterns, range(140)) == list(range(first, last + 1))
    for first, last in ((7, 123), (80, 119), (100, 109), (99, 1000), (31, 1247)):
        patterns = number_patterns(first, last)
        assert _fitting(patterns, range(2000)) == list(range(first, last + 1))


@pytest.mark.parametrize(
    ("first", "last", "patterns"),
    [
        (0, 9, ["?"]),
        (10, 19, ["1?"]),
        (20, 29, ["2?"]),
        (8, 15, ["[8-9]", "1[0-5]"]),
        (3, 3, ["3"]),
        (10, 79, ["[1-7]?"]),
    ],
)
def test_number_patterns_are_short(first: int, last: int, patterns: list[str]) -> None:
    assert number_patterns(first, last) == patterns


def test_kinds_are_cut_into_parts_of_their_own_layers() -> None:
    names = [f"m.layers.{n}.{kind}.weight" for n in range(5) for kind in ("attn.q", "mlp.down")]
    names += ["m.layers.4.extra.weight", "m.out.weight"]
    found = find_groups(names, 3)
    assert [g.label for g in found] == [
        *("m.layers.*.attn.q 0", "m.layers.*.attn.q 1-2", "m.layers.*.attn.q 3-4"),
        *("m.layers.*.mlp.down 0", "m.layers.*.mlp.down 1-2", "m.layers.*.mlp.down 3-4"),
        *("m.layers.*.extra 4", "m.out"),
    ]
    assert sorted(name for g in found for name in g.names) == sorted(names)
    assert found[1].patterns == ("m.layers.[1-2].attn.q",)
    assert found[-1].patterns == ("m.out",)


def test_experts_of_a_layer_are_one_kind() -> None:
    names = [f"l.{n}.experts.{e}.up.weight" for n in range(2) for e in range(3)]
    first, second = find_groups(names, 2)
    assert first.patterns == ("l.0.experts.*.up",) and len(first.names) == 3
    assert second.layers == (1,)


def test_a_pattern_that_would_fit_another_kind_is_not_used() -> None:
    names = ["l.0.e.0.up", "l.0.e.1.up", "l.0.e.shared.up", "l.0.q[1].up"]
    experts, shared, odd = find_groups(names, 3)
    assert experts.patterns == ("l.0.e.0.up", "l.0.e.1.up")
    assert shared.patterns == ("l.0.e.shared.up",)
    assert fnmatchcase("l.0.q[1].up", odd.patterns[0])
