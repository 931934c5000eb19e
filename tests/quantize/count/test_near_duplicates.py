from __future__ import annotations

import random

import numpy as np
import pytest

from headport.quantize.count import near_duplicates
from headport.quantize.count.near_duplicates import SeenDocuments, signatures


@pytest.fixture(autouse=True)
def small_filter(monkeypatch):
    monkeypatch.setattr(near_duplicates, "_FILTER_BITS", 1 << 20)


def words(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(count)]


def new(*documents: str) -> list[bool]:
    return SeenDocuments().add(signatures(documents)).tolist()


def test_runs_are_hashed_as_the_formula_says():
    data = np.arange(30, dtype=np.uint64)
    base = near_duplicates._BASE
    expected = [
        sum(int(v) * base ** (23 - j) for j, v in enumerate(data[i : i + 24])) % 2**64
        for i in range(7)
    ]
    assert near_duplicates._runs(data).tolist() == expected


def test_equal_documents_count_once_whatever_their_case_and_spaces():
    text = " ".join(words(200, 0))
    assert new(text, text) == [True, False]
    assert new(text, text.upper().replace(" ", " \n\t")) == [True, False]
    assert new("short", "short", "other", "") == [True, False, True, True]


def test_a_changed_word_leaves_a_duplicate_and_other_texts_stay():
    left_out = 0
    for seed in range(40):
        original = words(300, seed)
        changed = [*original]
        changed[seed * 7] = "changed"
        left_out += not new(" ".join(original), " ".join(changed))[1]
    assert left_out >= 36
    others = [" ".join(words(300, 1000 + seed)) for seed in range(60)]
    assert all(new(*others))


def test_half_the_same_is_no_duplicate():
    kept = 0
    for seed in range(40):
        original = words(300, seed)
        kept += new(" ".join(original), " ".join([*original[:190], *words(110, 500 + seed)]))[1]
    assert kept >= 38


def test_the_share_taken_for_old_is_that_of_the_formula():
    draw = np.random.default_rng(0)
    seen = SeenDocuments()
    seen.add(draw.integers(0, 2**63, (12_000, 6)).astype(np.uint64))
    expected = seen.wrong_share()
    trial = SeenDocuments(seen.bits.copy())
    fresh = draw.integers(0, 2**63, (2_000, 6)).astype(np.uint64)
    wrong = np.mean([not SeenDocuments(trial.bits.copy()).add(k[None])[0] for k in fresh[:300]])
    assert 0.005 < expected < 0.2
    assert abs(wrong - expected) < 0.05


def test_a_filter_goes_on_where_it_stopped():
    first, second = " ".join(words(100, 1)), " ".join(words(100, 2))
    seen = SeenDocuments()
    assert seen.add(signatures([first])).tolist() == [True]
    again = SeenDocuments(seen.bits.copy())
    assert again.add(signatures([first, second])).tolist() == [False, True]
