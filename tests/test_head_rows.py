"""The dynamic head: logits of some tokens from their rows, against those of the whole head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headport.bundle import Bundle
from headport.errors import BundleError
from headport.head_rows import HeadRows
from headport.head_subset import HeadSubset
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.quantize import Options, quantize
from headport.runner import open_runner
from tests.toy_bundles import write_toy

V, H = 307, 61  # both prime: blocks and bytes are cut short
BIAS = np.linspace(-2, 2, V).astype(np.float32)
COLUMNS = np.array([5, 300, 0, 306, 5, 77])
HIDDEN = np.random.default_rng(1).normal(0, 2, (4, H)).astype(np.float32)


def toy(folder: Path, width: int = H, half: bool = False, **changes: Any) -> Bundle:
    weight = np.random.default_rng(0).normal(size=(V, width)).astype(np.float32)
    return write_toy(folder / "toy", weight.astype(np.float16) if half else weight, **changes)


def check(bundle: Bundle, hidden: np.ndarray = HIDDEN) -> HeadSubset:
    """Rows of the written bundle are the whole head's, and were not taken from it."""
    runner = open_runner(bundle)
    whole = runner.full_logits(hidden)
    calls: list[int] = []

    def full(states: np.ndarray) -> np.ndarray:
        calls.append(len(states))
        return runner.full_logits(states)

    subset = HeadSubset(bundle, "lm", full)
    found = subset.logits(hidden, COLUMNS)
    assert subset.whole_because == "" and calls == [1]  # the check of the first state
    assert found.dtype == np.float32 and found.shape == (len(hidden), len(COLUMNS))
    rows = HeadRows(bundle, "lm")
    bound = rows.gather(COLUMNS).error_bound(hidden, rows.activation_block)
    error = np.abs(found.astype(np.float64) - whole[:, COLUMNS])
    assert (error <= bound).all()
    assert bound.max() < 0.02 * np.abs(whole).max()
    assert np.array_equal(runner.rows(hidden, COLUMNS), found)
    return subset


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"bias": BIAS},
        {"scale": 0.25, "softcap": 3.0, "bias": BIAS},
        {"half": True},
        {"tied": True},
    ],
)
def test_rows_of_a_head_as_exported(tmp_path, form):
    check(toy(tmp_path, **form))


FORMATS = [
    {"head": "int8", "block": 16},
    {"head": "int8", "block": 64},
    {"head": "int8-row"},
    {"head": "int4", "block": 32},
    {"head": "int4", "block": 32, "asymmetric": True},
    {"head": "fp16"},
    {"head": "bf16"},
    {"head": "fp8"},
]


@pytest.mark.parametrize("options", FORMATS)
@pytest.mark.parametrize("width", [H, 64])
def test_rows_of_a_quantised_head(tmp_path, options, width):
    source = toy(tmp_path, width, bias=BIAS)
    stored = quantize(Options(bundle=source.path, output=tmp_path / "q", **options))
    hidden = np.random.default_rng(1).normal(0, 2, (4, width)).astype(np.float32)
    check(stored, hidden)


@pytest.mark.parametrize("options", [FORMATS[0], *FORMATS[2:5]])
@pytest.mark.parametrize("activations", ["residual", "exact"])
def test_rows_of_a_lowered_head(tmp_path, options, activations):
    source = toy(tmp_path, bias=BIAS)
    quantize(Options(bundle=source.path, output=tmp_path / "q", activations=activations, **options))
    lowered = lower(LowerOptions(bundle=tmp_path / "q", output=tmp_path / "l", target="ort-cpu"))
    check(lowered)


def test_a_kernel_that_rounds_activations_runs_whole(tmp_path):
    source = toy(tmp_path)
    quantize(Options(bundle=source.path, output=tmp_path / "q", head="int8", activations="rounded"))
    bundle = lower(LowerOptions(bundle=tmp_path / "q", output=tmp_path / "l", target="ort-cpu"))
    runner = open_runner(bundle)
    subset = HeadSubset(bundle, "lm", runner.full_logits)
    assert "rounds activations" in subset.whole_because
    assert np.array_equal(runner.rows(HIDDEN, COLUMNS), runner.full_logits(HIDDEN)[:, COLUMNS])


def test_rows_of_a_certified_head_are_the_original_ones(tmp_path):
    source = toy(tmp_path, 64)
    stored = quantize(
        Options(bundle=source.path, output=tmp_path / "q", head="int8", rescore=16, certify=True)
    )
    hidden = np.random.default_rng(1).normal(0, 2, (4, 64)).astype(np.float32)
    check(stored, hidden)
    original = HeadRows(source, "lm").gather(COLUMNS).weight
    assert np.array_equal(HeadRows(stored, "lm").gather(COLUMNS).weight, original)


def test_restored_weights_have_the_bits_of_the_graph(tmp_path):
    source = toy(tmp_path)
    stored = quantize(Options(bundle=source.path, output=tmp_path / "q", head="int8"))
    runner = open_runner(stored)
    one = np.eye(H, dtype=np.float32)  # logits of a unit vector are weights
    whole = runner.full_logits(one)[:, COLUMNS].T
    assert np.array_equal(HeadRows(stored, "lm").gather(COLUMNS).weight, whole)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scale": 2.0}, "times the bound"),
        ({"softcap": 1.0}, "times the bound"),
        ({"bias": True}, "no bias of head.lm"),
    ],
)
def test_a_head_that_is_not_what_the_manifest_says_runs_whole(tmp_path, change, reason):
    source = toy(tmp_path)
    head = msgspec.structs.replace(source.manifest.heads["lm"], **change)
    wrong = Bundle(source.path, msgspec.structs.replace(source.manifest, heads={"lm": head}))
    runner = open_runner(source)
    subset = HeadSubset(wrong, "lm", runner.full_logits)
    expected = runner.full_logits(HIDDEN)[:, COLUMNS]
    for _ in range(2):
        assert np.array_equal(subset.logits(HIDDEN, COLUMNS), expected)
    assert reason in subset.whole_because


def test_a_state_that_is_not_finite_proves_nothing(tmp_path):
    source = toy(tmp_path)
    head = msgspec.structs.replace(source.manifest.heads["lm"], scale=2.0)
    wrong = Bundle(source.path, msgspec.structs.replace(source.manifest, heads={"lm": head}))
    runner = open_runner(source)
    subset = HeadSubset(wrong, "lm", runner.full_logits)
    odd = HIDDEN.copy()
    odd[0, 3] = np.nan
    expected = runner.full_logits(odd)[:, COLUMNS]
    assert np.array_equal(subset.logits(odd, COLUMNS), expected, equal_nan=True)
    assert subset.whole_because == ""  # the next finite state decides
    assert np.array_equal(subset.logits(odd[1:], COLUMNS), expected[1:])
    assert "times the bound" in subset.whole_because


def test_swapped_rows_are_noticed(tmp_path, monkeypatch, caplog):
    source = toy(tmp_path)
    runner = open_runner(source)
    gather = HeadRows.gather
    monkeypatch.setattr(HeadRows, "gather", lambda self, c: gather(self, c[::-1]))
    subset = HeadSubset(source, "lm", runner.full_logits)
    expected = runner.full_logits(HIDDEN)[:, COLUMNS]
    for _ in range(2):
        assert np.array_equal(subset.logits(HIDDEN, COLUMNS), expected)
    assert "times the bound" in subset.whole_because
    [message] = caplog.messages
    assert message == f"lm: {subset.whole_because}; the whole head runs instead"


def test_many_rows_come_from_the_whole_head(tmp_path):
    source = toy(tmp_path)
    runner = open_runner(source)
    many = np.arange(V)[::-1]
    assert np.array_equal(runner.rows(HIDDEN, many), runner.full_logits(HIDDEN)[:, many])


def test_no_rows_no_states_and_states_that_are_not_finite(tmp_path):
    runner = open_runner(toy(tmp_path))
    assert runner.rows(HIDDEN, np.array([], np.int64)).shape == (4, 0)
    assert runner.rows(HIDDEN[:0], COLUMNS).shape == (0, len(COLUMNS))
    odd = HIDDEN.copy()
    odd[0, 3] = np.nan
    found = runner.rows(odd, COLUMNS)
    assert np.isnan(found[0]).all() and np.isfinite(found[1:]).all()


def test_a_column_that_does_not_exist_is_refused(tmp_path):
    runner = open_runner(toy(tmp_path))
    with pytest.raises(BundleError, match=rf"has {V} columns, \[-1, {V}\] were asked for"):
        runner.rows(HIDDEN, np.array([3, -1, V]))


def test_rows_asked_for_again_are_remembered_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("headport.head_subset._REMEMBERED_BYTES", 2 * 6 * H * 4)
    bundle = toy(tmp_path)
    gathered = []
    gather = HeadRows.gather

    def count(self, columns):
        gathered.append(columns[0])
        return gather(self, columns)

    monkeypatch.setattr(HeadRows, "gather", count)
    runner = open_runner(bundle)
    for first in (1, 1, 2, 1, 3, 1, 2):  # 2 was forgotten for 3
        runner.rows(HIDDEN, np.array([first, *COLUMNS[1:]]))
    assert gathered == [1, 2, 3, 2]


def test_states_in_half_precision_are_widened(tmp_path):
    bundle = toy(tmp_path, half=True)
    runner = open_runner(bundle)
    found = runner.rows(HIDDEN.astype(np.float16), COLUMNS)
    whole = runner.full_logits(HIDDEN.astype(np.float16))[:, COLUMNS]
    assert np.allclose(found, whole, atol=1e-4)
