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

from headport.quantize.scale_search import search_scale

__all__ = ["GRIDS", "Grid", "Rounded", "dequantize", "split_blocks"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Array = npt.NDArray[Any]

_SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal


@dataclass(frozen=True)
class Grid:
    """The integers of a format."""

    bits: int
    symmetric: bool
    positive: bool = True  # no scale is negative

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

        8 bits: S = max|w| / 127; Z = 0.
        4 bits, symmetric: S as `headport.quantize.scale_search` finds it; Z = 0.
        asymmetric: S = (max(w, 0) − min(w, 0)) / (high − low), Z = round(−min(w, 0) / S).
        A zero block has S = 1. A scale that float32 holds only as a subnormal number is the next
        one further from zero, so that it is never zero.

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
        if self.bits == 8:
            scale = largest / np.float32(self.high)
        else:
            scale = search_scale(blocks, self.low, self.high, positive=self.positive)
        return _never_zero(scale, largest), np.zeros_like(largest)

    def round(self, blocks: Float32, scale: Float32, zero: Float32) -> Float32:
        """Q = clip(round_half_even(w / S) + Z, low, high), as float32; shapes as for `fit`."""
        whole = np.rint(blocks / scale[..., None]) + zero[..., None]
        clipped: Float32 = np.clip(whole, np.float32(self.low), np.float32(self.high))
        return clipped

    def value(self, whole: Float32, scale: Float32, zero: Float32) -> Float32:
        """(Q − Z) · S in float32."""
        return (whole - zero[..., None]) * scale[..., None]


def _never_zero(scale: Float32, size: Float32) -> Float32:
    tiny = (size > 0) & (np.abs(scale) < _SMALLEST_NORMAL)
    away = np.copysign(np.float32(1), scale)
    scale = np.where(tiny, np.nextafter(scale, away), scale)
    return np.where(size == 0, np.float32(1), scale)


GRIDS = {
    "int8": Grid(8, symmetric=True),
    "int4": Grid(4, symmetric=True, positive=False),
    "int4-positive": Grid(4, symmetric=True),
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
