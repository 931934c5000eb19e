"""Ratios and quality of `benchmarks.peers`, on numbers that can be checked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.child import Variant
from benchmarks.peers.table import Measured, exact_of, ratios


def measured(name: str, file: str, nll: list[float], first: list[int], *steps: float) -> Measured:
    found = Measured(Variant(name, file, Path(name)), 1, "", {}, 0.0, nll, first)
    for step in steps:
        turn = {"step_s": [9.0, step, step], "prefill_s": 10 * step, "peak_rss_bytes": 1}
        found.add_round([turn], dropped=1)
    return found


TORCH = measured("torch_fp32", "torch_model.py", [1.0, 3.0], [5, 7], 4.0, 8.0, 6.0)
OURS = measured("int8", "bundle.py", [1.5, 3.5], [5, 8], 1.0, 4.0, 2.0)
PRUNED = measured("small", "bundle.py", [], [5, 7], 1.0, 1.0, 1.0)


def test_ratios_are_taken_round_by_round_against_the_first_bundle() -> None:
    found = ratios([TORCH, OURS, PRUNED])
    assert found["torch_fp32"]["step"] == 3.0  # of 4, 2 and 3
    assert found["torch_fp32"]["prefill"] == 3.0
    assert found["torch_fp32"]["low"] == pytest.approx(2.2)
    assert found["int8"] == {"step": 1.0, "low": 1.0, "high": 1.0, "prefill": 1.0}
    assert found["small"]["step"] == 0.5


def test_quality_is_against_torch_and_a_pruned_model_has_no_perplexity() -> None:
    exact = exact_of([OURS, TORCH])
    assert exact is TORCH
    drift, same = OURS.quality(exact)
    assert drift == pytest.approx(1.6487, abs=1e-4)  # e to the mean difference, 0.5
    assert same == 0.5
    assert PRUNED.quality(exact) == (None, 1.0)
    assert OURS.quality(None) == (None, None)
    assert exact_of([OURS]) is None
