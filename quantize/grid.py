"""Integers with one scale per block: how a grid is fitted, rounded to, and read back.

    Ŵ[v, h] = (Q[v, h] − Z[v, k]) · S[v, k],   k = h // block,   low ≤ Q ≤ high

Z is 0 on a symmetric grid. Every rounding of a weight, nearest or error-compensated, is made of
these steps, all in float32 as the kernels' scales are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["GRIDS", "Grid", "Rounded", "dequantize", "split_blocks"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Array = npt.NDArray[Any]

_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
# A block's largest magnitude is put at each of these multiples of the step, and the one that loses
# least is kept: with few steps it pays to reach beyond the grid's end, or to clip a little.
_ENDS = {8: (127.0,), 4: (7.0, 7.5, 8.0, 8.5, 9.0)}


@dataclass(frozen=True)
class Grid:
    """The integers of a format."""

    bits: int
    symmetric: bool

    @property
    def low(self) -> int:
        """Smallest integer; INT8 is kept symmetric, so that -128 is never used."""
        if not self.symmetric:
            return 0
        return -127 if self.bits == 8 else -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        """Largest integer."""
        return (1 << self.bits) - 1 if not self.symmetric else (1 << (self.bits - 1)) - 1

    def fit(self, blocks: Float32) -> tuple[Float32, Float32]:
        """Scale and zero point of each block.

        symmetric: S = max|w| / e with the e of `_ENDS` that loses least; Z = 0.
        asymmetric: S = (max(w, 0) − min(w, 0)) / (high − low), Z = round(−min(w, 0) / S).
        A zero block has S = 1. A scale that float32 holds only as a subnormal number is the next
        larger one, so that it is never zero and no quotient leaves the grid for want of precision.

        Args:
            blocks: [..., B] float32.

        Returns:
            S and Z, both [...] float32; Z holds whole numbers.
        """
        if not self.symmetric:
            least = np.minimum(blocks.min(axis=-1), 0)
            span = np.maximum(blocks.max(axis=-1), 0) - least
            scale = _never_zero(span / np.float32(self.high - self.low), span)
            zero = np.clip(np.rint(-least / scale), self.low, self.high)
            return scale, zero.astype(np.float32)
        largest = np.abs(blocks).max(axis=-1)
        ends = [_never_zero(largest / np.float32(e), largest) for e in _ENDS[self.bits]]
        zero = np.zeros_like(largest)
        if len(ends) == 1:
            return ends[0], zero
        losses = [
            # float64, so that the choice does not depend on the order of the sum.
            np.square(
                blocks - self.value(self.round(blocks, s, zero), s, zero), dtype=np.float64
            ).sum(axis=-1)
            for s in ends
        ]
        scale = np.take_along_axis(np.stack(ends), np.argmin(losses, axis=0)[None], axis=0)[0]
        return scale, zero

    def round(self, blocks: Float32, scale: Float32, zero: Float32) -> Float32:
        """Q = clip(round_half_even(w / S) + Z, low, high), as float32; shapes as for `fit`."""
        whole = np.rint(blocks / scale[..., None]) + zero[..., None]
        clipped: Float32 = np.clip(whole, np.float32(self.low), np.float32(self.high))
        return clipped

    def value(self, whole: Float32, scale: Float32, zero: Float32) -> Float32:
        """(Q − Z) · S in float32."""
        return (whole - zero[..., None]) * scale[..., None]


def _never_zero(scale: Float32, size: Float32) -> Float32:
    tiny = (size > 0) & (scale < _SMALLEST_NORMAL)
    scale = np.where(tiny, np.nextafter(scale, np.float32(1)), scale)
    return np.where(size == 0, np.float32(1), scale)


GRIDS = {
    "int8": Grid(8, symmetric=True),
    "int4": Grid(4, symmetric=True),
    "uint4": Grid(4, symmetric=False),
}


@dataclass(frozen=True)
class Rounded:
    """A rounded matrix [V, H], K = ceil(H / block)."""

    whole: npt.NDArray[np.int16]  # Q [V, H]
    scale: Float32  # [V, K]
    zero: npt.NDArray[np.int16]  # Z [V, K]


def dequantize(rounded: Rounded, block: int) -> Float64:
    """Ŵ [V, H], float64; exact, because the product of both fits in 53 bits."""
    H = rounded.whole.shape[1]
    scale = np.repeat(rounded.scale.astype(np.float64), block, axis=1)[:, :H]
    zero = np.repeat(rounded.zero, block, axis=1)[:, :H]
    values: Float64 = (rounded.whole - zero) * scale
    return values


def split_blocks(weight: Array, block: int) -> Float32:
    """[V, H] → [V, K, block] float32; the zeros that fill up the last block change no scale."""
    V, H = weight.shape
    count = -(-H // block)
    padded = weight.astype(np.float32, copy=False)
    if count * block != H:
        padded = np.pad(padded, ((0, 0), (0, count * block - H)))
    return padded.reshape(V, count, block)
