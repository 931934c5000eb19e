"""The scale of a block of 4-bit integers that loses least.

The block's weight of largest magnitude m is put on −e steps for each of some e. The integers that
come of it have a best scale of their own, by weighted least squares, and the e whose scale loses
least is kept:

    q = clip(round_half_even(e · w / u), low, high),   u = −m, or |m| where scales are positive
    S = Σ |w| w q / Σ |w| q²,   which minimises Σ |w| (w − S q)²

S may be negative: only −8 is eight steps from 0, so the largest weight is put there whatever its
sign, as ONNX Runtime and llama.cpp do. Large weights count for more because the model notices more
what they lose (measured: docs/quantize.md).

Sums are made of w / u in whole multiples of 2⁻²⁰, so that float64 holds them exactly and no order
of summation, and so no machine, changes a scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["search_scale"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

# Named with the same numbers, on purpose not shared, by `headport.quantize.formulas`.
_ENDS = (6.5, 6.75, 7.0, 7.25, 7.5, 7.75, 8.0, 8.25, 8.5, 8.75, 9.0)
# |w| w q summed: 2^40 · 2^3 · 2^8 weights of a block are 2^51, below float64's 2^53.
_UNITS = 2.0**20
_PIECE_ELEMENTS = 1 << 16  # weights worked on at a time: what a processor's cache holds


def search_scale(
    blocks: npt.NDArray[Any], low: int, high: int, *, positive: bool = False
) -> Float32:
    """Scale of each block.

    Args:
        blocks: w, shape [..., B], float32, B at most 256.
        low: Smallest integer.
        high: Largest integer.
        positive: No scale may be negative.

    Returns:
        S, shape [...], float32; 0 for a block of zeros, and where float32 holds nothing so small.
    """
    flat = blocks.reshape(-1, blocks.shape[-1])
    found = np.empty(len(flat), np.float32)
    step = max(1, _PIECE_ELEMENTS // flat.shape[1])
    for start in range(0, len(flat), step):
        rows = slice(start, start + step)
        found[rows] = _search(flat[rows], low, high, positive=positive)
    return found.reshape(blocks.shape[:-1])


def _search(blocks: Float32, low: int, high: int, *, positive: bool) -> Float64:
    first = np.abs(blocks).argmax(axis=1)[:, None]
    largest = np.take_along_axis(blocks, first, axis=1).astype(np.float64)
    unit = np.abs(largest) if positive else -largest
    unit[unit == 0] = 1
    ratio = np.rint(blocks / unit * _UNITS)
    size = np.abs(ratio)
    product = size * ratio
    best, scale = np.zeros(len(blocks)), np.zeros(len(blocks))
    for end in _ENDS:
        whole = ratio * (end / _UNITS)
        np.rint(whole, out=whole)
        np.clip(whole, low, high, out=whole)
        along = np.einsum("nb,nb->n", product, whole)
        np.square(whole, out=whole)
        square = np.maximum(np.einsum("nb,nb->n", size, whole), 1)
        gained = along * along / square  # Σ |w| w² less what is lost
        better = gained > best
        best = np.where(better, gained, best)
        scale = np.where(better, along / square, scale)
    return scale / _UNITS * unit[:, 0]
