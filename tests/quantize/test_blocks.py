"""Rounding to INT8 blocks: numbers checkable by hand, and every guard."""

from __future__ import annotations

import numpy as np
import pytest

from headport.errors import QuantizeError
from headport.quantize.blocks import BLOCKS, dequantize_blocks, quantize_blocks


def _row(*values: float, block: int = 16) -> np.ndarray:
    return np.array([[*values, *[0.0] * (block - len(values))]], np.float32)


def test_scale_is_the_largest_magnitude_over_127() -> None:
    rounded, scale = quantize_blocks(_row(-254.0, 2.0, 0.9, 127.0), 16)
    assert scale.tolist() == [[2.0]]
    assert rounded[0, :4].tolist() == [-127, 1, 0, 64]  # 63.5 → 64, the even neighbour
    assert rounded.dtype == np.int8 and scale.dtype == np.float32


def test_halves_go_to_the_even_neighbour() -> None:
    rounded, _ = quantize_blocks(_row(127.0, 0.5, 1.5, 2.5, -0.5, -1.5), 16)
    assert rounded[0, :6].tolist() == [127, 0, 2, 2, 0, -2]


def test_each_block_has_its_own_scale() -> None:
    weight = np.concatenate([_row(127.0), _row(254.0), np.full((1, 3), 381.0, np.float32)], axis=1)
    rounded, scale = quantize_blocks(weight, 16)
    assert scale.tolist() == [[1.0, 2.0, 3.0]]  # the last block holds three weights
    assert rounded.shape == (1, 35) and rounded[0, -3:].tolist() == [127, 127, 127]


def test_zero_blocks_stay_exactly_zero() -> None:
    weight = np.zeros((2, 32), np.float32)
    weight[1, 16] = 1.0
    rounded, scale = quantize_blocks(weight, 16)
    assert scale[0].tolist() == [1.0, 1.0] and scale[1, 0] == 1.0
    assert not dequantize_blocks(rounded, scale, 16)[0].any()


@pytest.mark.parametrize("factor", [1.0, 200.0, 1e-6, 1e-30, 1e-38])
def test_relative_error_does_not_depend_on_magnitude(factor: float) -> None:
    weight = np.random.default_rng(0).normal(size=(31, 61)).astype(np.float32)
    weight[7] *= np.float32(factor)
    rounded, scale = quantize_blocks(weight, 32)
    error = np.abs(dequantize_blocks(rounded, scale, 32)[7] - weight[7].astype(np.float64))
    # Half a step, and at 1e-38 the step itself is a subnormal number with few bits.
    assert error.max() <= np.abs(weight[7]).max() / 127 * 0.51
    assert (scale > 0).all() and np.abs(rounded.astype(int)).max() == 127


@pytest.mark.parametrize("units", [1, 36, 64, 127, 190, 191, 1000, 100_000])
def test_smallest_numbers_of_float32_survive(units: int) -> None:
    # In units of the smallest subnormal number: 36 / 127 rounds to a scale of 0, and 190 / 127 to
    # 1, which is too small for the quotient to stay within 127.
    weight = (np.array([[units, -units, units // 2, *[0] * 13]]) * 2.0**-149).astype(np.float32)
    rounded, scale = quantize_blocks(weight, 16)
    assert scale[0, 0] > 0
    error = np.abs(dequantize_blocks(rounded, scale, 16) - weight)
    assert error.max() <= scale[0, 0] / 2


def test_any_shape_is_within_half_a_step() -> None:
    rng = np.random.default_rng(1)
    for shape in ((1, 1), (2, 7), (1009, 96), (64, 64), (31, 255)):
        weight = rng.normal(size=shape).astype(np.float32)
        for block in BLOCKS:
            rounded, scale = quantize_blocks(weight, block)
            step = np.repeat(scale, block, axis=1)[:, : shape[1]]
            error = np.abs(dequantize_blocks(rounded, scale, block) - weight)
            assert (error <= step * 0.5001).all()
            assert scale.shape == (shape[0], -(-shape[1] // block))


def test_non_finite_rows_are_named() -> None:
    weight = np.ones((12, 16), np.float32)
    weight[3, 5], weight[11, 0] = np.nan, np.inf
    with pytest.raises(QuantizeError, match="row 103, 111;"):
        quantize_blocks(weight, 16, first_row=100)


@pytest.mark.parametrize("block", [0, 1, 8, 48, 512, -64])
def test_unsupported_blocks_are_refused(block: int) -> None:
    with pytest.raises(QuantizeError, match=f"block size {block} is not supported; use one of 16"):
        quantize_blocks(np.ones((1, 512), np.float32), block)


def test_half_precision_weights_are_widened_first() -> None:
    weight = np.random.default_rng(2).normal(size=(5, 48)).astype(np.float16)
    expected = quantize_blocks(weight.astype(np.float32), 32)
    found = quantize_blocks(weight, 32)
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))
