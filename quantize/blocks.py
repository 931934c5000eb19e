"""Rounding a matrix to INT8, symmetrically, in blocks along its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headport.errors import QuantizeError
from headport.quantize.grid import GRIDS, split_blocks

__all__ = ["BLOCKS", "dequantize_blocks", "quantize_blocks", "refuse_non_finite"]

# Block sizes that every kernel we lower to computes right: each was run against the float64
# product, and the tests run each again. ONNX Runtime asks for powers of two from 16.
BLOCKS = (16, 32, 64, 128, 256)

_INT8 = GRIDS["int8"]

Float = npt.NDArray[Any]


def quantize_blocks(
    weight: Float, block: int, first_row: int = 0
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Round each row's blocks of `block` weights to INT8 with one scale per block.

    scale[v, k] = max(|W[v, block k]|) / 127 in float32, 1 where the block is zero
    Q[v, h] = clip(round_half_even(W[v, h] / scale[v, h // block]), -127, 127), also in float32

    The last block of a row is shorter where `block` does not divide H. Where a scale is so small
    that float32 holds it only as a subnormal number, it is the next larger one, so that it is
    never zero and no quotient exceeds 127.

    Args:
        weight: W, shape [V, H], any floating-point type that float32 holds.
        block: Weights that share a scale, one of `BLOCKS`.
        first_row: Number of W's first row in messages, where W is a part of a larger matrix.

    Returns:
        Q, shape [V, H], int8 in [-127, 127]; scale, shape [V, ceil(H / block)], float32, > 0.

    Raises:
        QuantizeError: If W holds NaN or infinity, naming the rows, or `block` is not supported.
    """
    if block not in BLOCKS:
        supported = ", ".join(map(str, BLOCKS))
        raise QuantizeError(f"block size {block} is not supported; use one of {supported}")
    V, H = weight.shape
    refuse_non_finite(weight, first_row)
    blocks = split_blocks(weight, block)
    scale, zero = _INT8.fit(blocks)
    rounded = _INT8.round(blocks, scale, zero).astype(np.int8)
    return np.ascontiguousarray(rounded.reshape(V, -1)[:, :H]), scale


def dequantize_blocks(
    rounded: npt.NDArray[np.int8], scale: npt.NDArray[np.float32], block: int
) -> npt.NDArray[np.float64]:
    """The matrix Ŵ that the rounded one stands for: Q[v, h] · scale[v, h // block].

    Args:
        rounded: Q, shape [V, H], int8.
        scale: Shape [V, ceil(H / block)], float32.
        block: Weights that share a scale.

    Returns:
        Ŵ, shape [V, H], float64; exact, because the product of both fits in 53 bits.
    """
    H = rounded.shape[1]
    each = np.repeat(scale.astype(np.float64), block, axis=1)[:, :H]
    return rounded * each


def refuse_non_finite(weight: Float, first_row: int) -> None:
    """Refuse a weight [V, H] that holds NaN or infinity.

    Raises:
        QuantizeError: Naming the rows, counted from `first_row`.
    """
    rows = np.flatnonzero(~np.isfinite(weight).all(axis=1)) + first_row
    if len(rows):
        named = ", ".join(map(str, rows[:8]))
        more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
        raise QuantizeError(
            f"the weight holds NaN or infinity in row {named}{more}; "
            "a bundle cannot be made of it, repair the checkpoint"
        )
