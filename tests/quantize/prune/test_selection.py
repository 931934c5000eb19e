"""Which ids stay, on a vocabulary of letters that can be followed by hand."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from headport.errors import UsageError
from headport.quantize.prune.closure import Closure
from headport.quantize.prune.selection import Limits, Selection, Wanted, select
from headport.quantize.prune.tokens import TokenTable

#        0    1    2    3    4     5     6      7     8    9
PIECES = ["a", "b", "c", "d", "ab", "cd", "abc", "bc", "x", "y"]
MERGES = [("a", "b"), ("c", "d"), ("ab", "c"), ("b", "c")]
V = len(PIECES)


def _closure(**always: set[int]) -> Closure:
    inner = Tokenizer(models.BPE(vocab={p: n for n, p in enumerate(PIECES)}, merges=MERGES))
    table = TokenTable.parse(inner.to_str().encode())
    assert json.loads(inner.to_str())["model"]["type"] == "BPE"
    return Closure(table, V, always or {"bytes": {0, 1, 2, 3}}, ())


def _select(counts: list[int] | None, *, limits: Any = None, **wanted: Any) -> Selection:
    found = None if counts is None else np.array(counts, np.int64)
    return select(
        _closure(),
        wanted.pop("available", range(V)),
        Wanted(counts=found, **wanted),
        Limits(**({"least": 0} | (limits or {}))),
    )


def test_what_occurs_stays_with_what_it_needs() -> None:
    #                    a  b  c  d  ab cd abc bc x  y
    found = _select([0, 0, 0, 0, 0, 0, 3, 0, 0, 1])
    assert found.kept.tolist() == [0, 1, 2, 3, 4, 6, 9]  # `abc` is made of `ab` and `c`
    assert found.by_reason == {"bytes": 4, "corpus": 2, "parts of kept tokens": 1}
    assert found.chosen == 2 and found.covered == 1.0


def test_min_count_and_everything() -> None:
    counts = [9, 9, 9, 9, 2, 1, 0, 0, 5, 4]
    assert _select(counts, limits={"min_count": 4}).kept.tolist() == [0, 1, 2, 3, 8, 9]
    assert _select(counts, limits={"min_count": 0}).kept.tolist() == list(range(V))
    assert _select(None, limits={"min_count": 0}).kept.tolist() == list(range(V))


def test_coverage_takes_the_fewest_most_frequent_tokens() -> None:
    counts = [0, 0, 0, 0, 60, 30, 0, 0, 6, 4]
    for coverage, kept in ((0.6, [4]), (0.61, [4, 5]), (0.9, [4, 5]), (0.96, [4, 5, 8])):
        found = _select(counts, limits={"coverage": coverage})
        assert found.kept.tolist() == [0, 1, 2, 3, *kept]
        assert found.covered is not None and found.covered >= coverage


def test_max_size_counts_everything_and_grows_without_losing() -> None:
    counts = [0, 0, 0, 0, 1, 8, 9, 7, 1, 0]
    kept = [_select(counts, limits={"max_size": k}).kept.tolist() for k in range(4, 10)]
    # `abc`, the most frequent, takes two places.
    assert [k[4:] for k in kept] == [[], [], [4, 6], [4, 5, 6], [4, 5, 6, 7], [4, 5, 6, 7, 8]]
    assert all(set(a) <= set(b) for a, b in itertools.pairwise(kept))
    with pytest.raises(UsageError, match=r"--max-size 3: 4 tokens stay in any case \(4 bytes\)"):
        _select(counts, limits={"max_size": 3})


def test_keep_and_union_come_before_the_limits() -> None:
    counts = [0, 0, 0, 0, 0, 9, 0, 0, 0, 0]
    found = _select(
        counts,
        limits={"max_size": 7},
        keep=frozenset({8}),
        union=(np.array([9, 7]),),
    )
    assert found.kept.tolist() == [0, 1, 2, 3, 7, 8, 9]
    assert found.by_reason == {"bytes": 4, "--keep": 1, "--union": 2}


def test_a_dropped_token_takes_with_it_what_is_made_of_it() -> None:
    counts = [1] * V
    found = _select(counts, drop=frozenset({4}))
    assert found.kept.tolist() == [0, 1, 2, 3, 5, 7, 8, 9] and found.dropped == 2


@pytest.mark.parametrize(
    ("keep", "drop", "message"),
    [
        (set(), {1, 8}, r"--drop: these tokens are always kept: 'b' \(id:1\) \(bytes\)"),
        ({6}, {4}, r"contradict each other: 'abc' \(id:6\) needs 'ab' \(id:4\)"),
        ({8}, {8}, r"'x' \(id:8\) needs 'x'"),
    ],
)
def test_contradictions_are_refused(keep: set[int], drop: set[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _select([1] * V, keep=frozenset(keep), drop=frozenset(drop))


def test_a_corpus_that_chooses_too_little_is_refused() -> None:
    counts = [500, 500, 500, 500, 0, 0, 0, 0, 3, 0]
    with pytest.raises(UsageError, match=r"chooses 1 tokens besides .* at least 2 were expected"):
        _select(counts, limits={"least": 2})
    assert _select(counts, limits={"least": 1}).chosen == 1


def test_only_what_is_there_can_stay() -> None:
    found = _select([1] * V, available=[0, 1, 2, 3, 5, 6, 8])
    # `ab` is gone, and `abc` cannot be made without it.
    assert found.kept.tolist() == [0, 1, 2, 3, 5, 8]
