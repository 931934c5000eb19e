"""The scale of a 4-bit block: by hand, against every other scale, and the same on any machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headport.errors import ParityError
from headport.lowering.bounds import head_bound
from headport.quantize import Options, quantize, scale_search
from headport.quantize.formats import FORMATS, round_to_nearest
from headport.quantize.grid import GRIDS, dequantize
from headport.quantize.scale_search import search_scale
from tests.toy_bundles import write_toy

SIGNED, POSITIVE = GRIDS["int4"], GRIDS["int4-positive"]


def _blocks(count: int = 60, block: int = 32) -> np.ndarray:
    rng = np.random.default_rng(2)
    found = rng.normal(size=(count, block)) * np.exp(rng.normal(size=(count, block)))
    return found.astype(np.float32)


def _lost(blocks: np.ndarray, scale: np.ndarray) -> np.ndarray:
    step = np.asarray(scale, np.float64)[..., None]
    rounded = np.clip(np.rint(blocks / step), -8, 7) * step
    return (np.abs(blocks) * np.square(blocks - rounded)).sum(axis=-1)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_weight_is_put_on_minus_eight(sign: int) -> None:
    block = sign * np.array([[4.0, -3.5, 1.5, 0.5] * 4], np.float32)
    rounded = round_to_nearest(block, 16, SIGNED)
    assert rounded.scale.tolist() == [[-0.5 * sign]]
    assert rounded.whole[0, :4].tolist() == [-8, 7, -3, -1]
    assert (dequantize(rounded, 16) == block).all()


def test_a_scale_is_the_least_squares_one_of_its_integers() -> None:
    block = np.zeros((1, 16), np.float32)
    block[0, :3] = 8.0, -3.125, -1.0  # −8, 3 and 1 steps of about −1
    scale = search_scale(block, -8, 7)
    # Σ |w| w q / Σ |w| q²
    expected = (8 * 8 * -8 + 3.125 * -3.125 * 3 + 1 * -1 * 1) / (8 * 64 + 3.125 * 9 + 1 * 1)
    assert scale[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("block", [16, 64, 256])
@pytest.mark.parametrize("grid", [SIGNED, POSITIVE])
def test_hardly_any_other_scale_loses_less(block: int, grid: object) -> None:
    blocks = _blocks(400, block)
    scale, _ = grid.fit(blocks)  # type: ignore[attr-defined]
    found = _lost(blocks, scale)
    largest = np.abs(blocks).max(axis=1) * np.sign(scale)
    others = np.min([_lost(blocks, largest / end) for end in np.arange(5, 12, 0.02)], axis=0)
    assert (found < 3 * others).all() and found.sum() < 1.05 * others.sum()


def test_nothing_is_lost_more_than_by_the_plain_scale() -> None:
    blocks = _blocks(400, 16)
    first = np.abs(blocks).argmax(axis=1)
    plain = -blocks[np.arange(len(blocks)), first].astype(np.float64) / 8
    found = _lost(blocks, search_scale(blocks, -8, 7))
    assert (found <= _lost(blocks, plain) * (1 + 1e-5)).all()
    assert found.sum() < 0.85 * _lost(blocks, plain).sum()
    positive = _lost(blocks, search_scale(blocks, -8, 7, positive=True))
    assert found.sum() < 0.9 * positive.sum()


def test_signs_are_those_asked_for() -> None:
    blocks = _blocks(200)
    signed, positive = SIGNED.fit(blocks)[0], POSITIVE.fit(blocks)[0]
    assert (signed < 0).any() and (signed > 0).any() and (positive > 0).all()
    turned = -blocks
    assert (SIGNED.fit(turned)[0] == -signed).all()
    same = signed > 0
    assert (signed[same] == positive[same]).all(), "where the largest weight is negative"


def test_neither_order_nor_piece_changes_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = _blocks(50, 64)
    whole = search_scale(blocks, -8, 7)
    mixed = np.random.default_rng(3).permutation(64)
    assert (search_scale(blocks[:, mixed], -8, 7) == whole).all()
    monkeypatch.setattr(scale_search, "_PIECE_ELEMENTS", 200)  # three blocks
    assert (search_scale(blocks.reshape(5, 10, 64), -8, 7).reshape(-1) == whole).all()


@pytest.mark.parametrize("size", [1e-45, 1e-38, 3e38])
def test_the_ends_of_float32(size: float) -> None:
    blocks = np.zeros((3, 16), np.float32)
    blocks[0, :2], blocks[1, :2] = (size, -size / 2), (-size, size)
    scale, _ = SIGNED.fit(blocks)
    assert scale[2] == 1 and scale[0] < 0 < scale[1] and np.isfinite(scale).all()
    whole = SIGNED.round(blocks, scale, np.zeros_like(scale))
    assert whole.min() >= -8 and whole.max() <= 7 and not whole[2].any()


def test_a_bound_does_not_depend_on_the_sign_of_scales(tmp_path: Path) -> None:
    weight = np.full((3, 16), 8.0, np.float32)
    bounds = []
    for sign in (1, -1):
        source = write_toy(tmp_path / f"toy{sign}", sign * weight)
        options = Options(
            bundle=source.path,
            output=tmp_path / f"q{sign}",
            head="int4",
            block=16,
            activations="rounded",
        )
        bounds.append(head_bound(quantize(options), "lm", np.eye(1, 16) * 254.0))
    assert (bounds[0] == bounds[1]).all()
    assert bounds[0][0, 0] > 16 * 8, "one unit of activation error · Σ|Ŵ|"


def test_a_scale_of_the_wrong_sign_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = FORMATS["int4"]

    def faulty(weight: np.ndarray, block: int, rounder: object) -> object:
        stored = kind.store(weight, block, rounder)  # type: ignore[arg-type]
        stored.tensors["scale"][4, 1] *= -1
        return stored

    source = write_toy(tmp_path / "toy", _blocks(9, 64))
    monkeypatch.setitem(FORMATS, "int4", replace(kind, store_with=faulty))  # type: ignore[arg-type]
    with pytest.raises(ParityError, match="row 4"):
        quantize(Options(bundle=source.path, output=tmp_path / "q", head="int4"))
