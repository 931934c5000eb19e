"""Every format of a head, written, lowered and run; compensated rounding; sabotage of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.errors import ParityError, QuantizeError, UsageError
from headport.ledger import find_tensor, read_tensor
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.quantize import Options, quantize
from headport.quantize.calibration import calibrate, compensated_rounder, loss_ratio
from headport.quantize.formats import FORMATS, round_to_nearest
from headport.quantize.formulas import rounded_weight, stored_scale, stored_weight
from headport.quantize.grid import GRIDS, dequantize
from headport.runner import open_runner
from tests.toy_bundles import write_toy

RECIPES: dict[str, dict[str, Any]] = {
    "int8-row": {"head": "int8-row"},
    "int4": {"head": "int4"},
    "int4-16": {"head": "int4", "block": 16},
    "int4-positive": {"head": "int4", "positive_scales": True},
    "int4-asymmetric": {"head": "int4", "asymmetric": True},
    "bf16": {"head": "bf16"},
    "fp8": {"head": "fp8"},
}


def _weight(V: int, H: int) -> np.ndarray:
    weight = np.random.default_rng(3).normal(size=(V, H)).astype(np.float32)
    weight[1], weight[2] = 0, weight[2] * np.float32(1e-20)
    weight[3, H // 2] = 300
    return weight


def _states(H: int) -> np.ndarray:
    return np.random.default_rng(4).normal(size=(6, H)).astype(np.float32)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("V", "H"), [(67, 61), (31, 160)])
def test_written_and_lowered(tmp_path: Path, recipe: str, V: int, H: int) -> None:
    source = write_toy(tmp_path / "toy", _weight(V, H), bias=np.linspace(-1, 1, V), softcap=9.0)
    asked = {"bundle": source.path, "output": tmp_path / "q", **RECIPES[recipe]}
    bundle = quantize(Options(**asked))
    head = bundle.manifest.heads["lm"]
    assert head.quantization is not None
    scale = stored_scale(bundle, head, slice(None)) if head.quantization.block else None
    expected = rounded_weight(_weight(V, H), head.quantization, scale)
    if recipe.startswith("int4") and head.quantization.symmetric:
        assert scale is not None and (scale < 0).any() == (recipe != "int4-positive")
    if not recipe.startswith(("bf16", "fp8")):
        assert (stored_weight(bundle, head, slice(None)) == expected).all()
    lowered = lower(LowerOptions(bundle=bundle.path, output=tmp_path / "l", target="ort-cpu"))
    wanted = 9 * np.tanh((_states(H).astype(np.float64) @ expected.T + np.linspace(-1, 1, V)) / 9)
    for made, limit in ((bundle, 2e-4), (lowered, 2e-3)):
        logits = open_runner(made).head(_states(H)).logits
        assert logits is not None and np.abs(logits - wanted).max() < limit
    size = sum(t.length for t in bundle.manifest.tensors if t.consumers[0].startswith("head"))
    bits = {"int8-row": 8, "bf16": 16, "fp8": 8}.get(recipe, 4)
    assert V * H * bits / 8 <= size < V * H * bits / 8 + 4 * V * (-(-H // 16) + 2)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_is_never_left_and_zero_stays_zero(grid: str) -> None:
    weight = _weight(31, 61)
    rounded = round_to_nearest(weight, 32, GRIDS[grid])
    assert rounded.whole.min() >= GRIDS[grid].low and rounded.whole.max() <= GRIDS[grid].high
    values = dequantize(rounded, 32)
    assert not values[1].any()
    step = np.abs(np.repeat(rounded.scale, 32, axis=1)[:, :61])
    # The largest magnitude may be clipped.
    assert (np.abs(values - weight) <= step * (1.51 if grid.startswith("int4") else 0.51)).all()


def _correlated(N: int, H: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    mix = rng.normal(size=(H, H)) * np.exp(rng.normal(size=H))
    return (rng.normal(size=(N, H)) @ mix).astype(np.float32)


@pytest.mark.parametrize(("grid", "block"), [("int8", 64), ("int4", 32), ("uint4", 16)])
@pytest.mark.parametrize("H", [61, 96])
def test_compensation_lowers_the_loss_on_new_states(grid: str, block: int, H: int) -> None:
    weight = np.random.default_rng(6).normal(size=(50, H)).astype(np.float32)
    states = _correlated(4 * H, H)
    calibration = calibrate([states[: 3 * H]], H)
    assert loss_ratio(weight, block, GRIDS[grid], calibration) < 0.8
    fresh = states[3 * H :]
    errors = [
        np.square(fresh @ (weight - dequantize(rounder(weight, block, GRIDS[grid]), block)).T).sum()
        for rounder in (compensated_rounder(calibration), round_to_nearest)
    ]
    assert errors[0] < 0.9 * errors[1]


def test_uncorrelated_channels_leave_nothing_to_compensate() -> None:
    weight = np.random.default_rng(6).normal(size=(20, 32)).astype(np.float32)
    calibration = calibrate([np.eye(32, dtype=np.float32) * 2], 32)
    rounded = compensated_rounder(calibration)(weight, 32, GRIDS["int8"])
    assert (rounded.whole == round_to_nearest(weight, 32, GRIDS["int8"]).whole).all()
    with pytest.raises(QuantizeError, match="loses no less than nearest rounding"):
        loss_ratio(weight, 32, GRIDS["int8"], calibration)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(QuantizeError, match=r"at least 8 tokens was expected .*, 7 found"):
        calibrate([np.ones((7, 8), np.float32)], 8)
    with pytest.raises(QuantizeError, match="not finite"):
        calibrate([np.full((9, 8), np.nan, np.float32)], 8)


def _texts(folder: Path) -> tuple[Path, ...]:
    text = "How many vexingly quick daft zebras jump? The five boxing wizards know. "
    for n in range(2):
        (folder / f"{n}.txt").write_text(text * 12 + str(n))
    return tuple(sorted(folder.glob("*.txt")))


def test_calibrated_head_of_a_model(tiny_bundle: Path, tmp_path: Path) -> None:
    asked = {"bundle": tiny_bundle, "head": "int4", "block": 16}
    files = _texts(tmp_path)
    bundle = quantize(Options(output=tmp_path / "c", calibration=files, **asked))
    stage = bundle.manifest.provenance.stages[-1]
    assert stage.options["rounding"] == "compensated"
    assert [each["name"] for each in stage.options["calibration"]] == ["0.txt", "1.txt"]
    assert 0 < stage.report["calibration"]["loss_ratio"] < 1
    head = bundle.manifest.heads["lm"]
    assert head.quantization is not None and head.quantization.rounding == "compensated"
    assert lower(LowerOptions(bundle=bundle.path, output=tmp_path / "l", target="ort-cpu"))
    again = quantize(Options(output=tmp_path / "d", calibration=files, **asked))
    assert [t.sha256 for t in again.manifest.tensors] == [t.sha256 for t in bundle.manifest.tensors]


def test_unreadable_calibration_texts(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 300)
    (tmp_path / "short.txt").write_text("a")
    for name, message in (
        ("none.txt", "cannot be read"),
        ("latin.txt", "not UTF-8"),
        ("short.txt", "two tokens or more"),
    ):
        asked = {"head": "int8", "calibration": (tmp_path / name,)}
        with pytest.raises(UsageError, match=message):
            quantize(Options(bundle=tiny_bundle, output=tmp_path / "o", **asked))


def _swap_rows(whole: np.ndarray, _scale: np.ndarray) -> None:
    whole[[4, 5]] = whole[[5, 4]]


def _swap_scales(_whole: np.ndarray, scale: np.ndarray) -> None:
    scale[[4, 5]] = scale[[5, 4]] * 3


def _shift(whole: np.ndarray, _scale: np.ndarray) -> None:
    whole += (whole < whole.max(axis=1, keepdims=True)).astype(whole.dtype)


@pytest.mark.parametrize("fault", [_swap_rows, _swap_scales, _shift])
def test_faults_of_compensated_rounding_are_caught(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    kind = FORMATS["int4"]

    def faulty(weight: np.ndarray, block: int, rounder: Any) -> Any:
        stored = kind.store(weight, block, rounder)
        fault(stored.tensors["int4"], stored.tensors["scale"])
        return stored

    monkeypatch.setitem(FORMATS, "int4", replace(kind, store_with=faulty))
    asked = {"bundle": tiny_bundle, "head": "int4", "calibration": _texts(tmp_path)}
    with pytest.raises(ParityError, match="nothing was written"):
        quantize(Options(output=tmp_path / "o", **asked))
    assert not (tmp_path / "o").exists()


def test_four_bit_values_are_read_back(tmp_path: Path) -> None:
    source = write_toy(tmp_path / "toy", _weight(5, 33))
    for name, asymmetric in (("int4", False), ("uint4", True)):
        bundle = quantize(
            Options(bundle=source.path, output=tmp_path / name, head="int4", asymmetric=asymmetric)
        )
        found = read_tensor(bundle, find_tensor(bundle.manifest, "head.lm", f"w.{name}"))
        expected = round_to_nearest(_weight(5, 33), 32, GRIDS[name]).whole
        assert (found == expected).all() and found.shape == (5, 33)
