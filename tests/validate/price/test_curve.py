from __future__ import annotations

import numpy as np
import pytest

from headport.validate.price.curve import keep_order, make_curve
from headport.validate.price.scripts import script_of


def order(size: int = 10):
    counts = np.array([0, 9, 0, 5, 7, 0, 1])
    return keep_order(counts, {8, 2, 99}, lambda i: {i, 5} if i == 4 else {i}, size)


def test_ids_are_kept_in_the_order_of_pruning():
    found = order()
    assert found.ids.tolist() == [2, 8, 1, 4, 5, 3, 6, 0, 7, 9]
    assert found.place[found.ids].tolist() == list(range(10))
    assert found.sizes[0] == 2 and found.sizes[-2] == 7 and found.sizes[-1] == 10
    assert found.starts.tolist() == [0, *found.sizes[:-1].tolist()]


def test_a_cut_is_suggested_where_the_loss_becomes_small_enough():
    found = order()
    lost = np.linspace(0.6, 0.1, len(found.sizes))
    lost[-1] = 0
    covered = 1 - lost
    settings = {"bytes_per_row": 4.5, "step_ms": ((10, 2.0), (5, 1.0))}
    curve = make_curve(found, lost, covered, limit=0.25, **settings)
    at = next(n for n, mass in enumerate(lost) if mass <= 0.25)
    assert curve.suggestion.kept == found.sizes[at]
    assert f"K = {found.sizes[at - 1]} loses" in curve.suggestion.reason
    assert curve.points[-1].step_ms == pytest.approx(2.0)
    assert curve.points[0].step_ms == pytest.approx(0.4)
    assert curve.points[-1].head_bytes == 45
    none = make_curve(found, lost, covered, limit=0.01, **settings)
    assert none.suggestion.kept is None and "count more text" in none.suggestion.reason
    slow = make_curve(found, lost, covered, limit=0.01, bytes_per_row=1, step_ms=((10, 1), (5, 2)))
    assert {p.step_ms for p in slow.points} == {None}


@pytest.mark.parametrize(
    ("text", "script"),
    [
        (" the", "Latin"),
        ("中", "Han"),
        ("ひ", "Hiragana"),
        ("д", "Cyrillic"),
        ("Ａ", "Latin"),
        (" 12", "digits"),
        (" \n", "space"),
        ("+=", "symbols"),
        ("ß", "Latin"),
        ("한", "Hangul"),
        ("ﾡ", "Hangul"),
        ("ｱ", "Katakana"),
        ("ｰ", "Katakana"),
    ],
)
def test_a_piece_is_of_the_script_of_its_first_letter(text, script):
    assert script_of(text) == script
