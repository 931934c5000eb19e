"""The formats a head's weight can be stored in, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.errors import QuantizeError
from headport.progress import track
from headport.quantize.blocks import refuse_non_finite
from headport.quantize.grid import GRIDS, Grid, Rounded, dequantize, split_blocks

__all__ = ["FORMATS", "Format", "Rounder", "StoredWeight", "round_to_nearest"]

Array = npt.NDArray[Any]
# (W [n, H], block, grid) → W rounded to the grid's integers
Rounder = Callable[[Array, int, Grid], Rounded]

_CHUNK_ELEMENTS = 1 << 22  # weights worked on at a time: 16 MB as float32
_LARGEST_FP8 = 448.0  # of float8 e4m3
_LARGEST_HALF = {"fp16": 65504.0, "bf16": 3.38953e38}


@dataclass(frozen=True)
class StoredWeight:
    """A weight as it will be stored, and what rounding did to it."""

    tensors: dict[str, Array]  # by suffix; the first is the weight itself
    row_errors: npt.NDArray[np.float64]  # [V], ‖W_v − Ŵ_v‖ / ‖W_v‖, 0 for a zero row

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, two 4-bit integers to a byte."""
        return sum(
            -(-a.size * _BITS.get(a.dtype, 8 * a.itemsize) // 8) for a in self.tensors.values()
        )


_BITS = {np.dtype(ml_dtypes.int4): 4, np.dtype(ml_dtypes.uint4): 4}


@dataclass(frozen=True)
class Format:
    """How a weight is stored and how a graph gets float32 back from it."""

    grid: Grid | None  # its integers; None: floating-point numbers, always rounded to nearest
    store_with: Callable[[Array, int, Rounder], StoredWeight]
    # (stored values by suffix, block) → node whose output is Ŵ [V, H] float32
    restore: Callable[[Mapping[str, ir.Value], int], ir.Node]
    blocks: tuple[int, ...] = ()  # how many weights of a row may share a scale; the default first
    candidates: int = 0  # default number of candidates where they are rescored; 0: not offered
    certifiable: bool = False  # its error is small enough for a certificate to prove anything

    def store(self, weight: Array, block: int, rounder: Rounder | None = None) -> StoredWeight:
        """W [V, H] as this format stores it; `rounder` is nearest rounding unless given."""
        return self.store_with(weight, block, rounder or round_to_nearest)


def round_to_nearest(weight: Array, block: int, grid: Grid) -> Rounded:
    """Every weight to the nearest integer of its block's grid."""
    V, H = weight.shape
    blocks = split_blocks(weight, block)
    scale, zero = grid.fit(blocks)
    whole = grid.round(blocks, scale, zero).reshape(V, -1)[:, :H]
    return Rounded(whole.astype(np.int16), scale, zero.astype(np.int16))


@dataclass(frozen=True)
class _Integers:
    """Integers of one grid with a scale per block, or per row."""

    grid: Grid
    name: str
    dtype: Any
    per_row: bool = False

    def store(self, weight: Array, block: int, rounder: Rounder) -> StoredWeight:
        V, H = weight.shape
        width = H if self.per_row else block
        whole = np.empty((V, H), self.dtype)
        scale = np.empty((V, -(-H // width)), np.float32)
        zero = np.empty(scale.shape, self.dtype)
        errors = np.empty(V, np.float64)
        for rows in _row_slices(V, H):
            refuse_non_finite(weight[rows], rows.start)
            part = rounder(weight[rows], width, self.grid)
            whole[rows], scale[rows], zero[rows] = part.whole, part.scale, part.zero
            errors[rows] = _relative(weight[rows], dequantize(part, width))
        tensors = {self.name: whole, "scale": scale[:, 0].copy() if self.per_row else scale}
        if not self.grid.symmetric:
            tensors["zero"] = zero
        return StoredWeight(tensors, errors)

    def restore(self, values: Mapping[str, ir.Value], block: int) -> ir.Node:
        attributes = {"axis": 0} if self.per_row else {"axis": 1, "block_size": block}
        names = [self.name, "scale"] + ([] if self.grid.symmetric else ["zero"])
        return ir.node("DequantizeLinear", [values[each] for each in names], attributes)

    def format(
        self, blocks: tuple[int, ...], candidates: int, *, certifiable: bool = False
    ) -> Format:
        return Format(self.grid, self.store, self.restore, blocks, candidates, certifiable)


def _store_half(name: str, dtype: Any, weight: Array, block: int, rounder: Rounder) -> StoredWeight:
    del block, rounder
    if weight.dtype == dtype:
        stored = np.dtype(dtype).name
        raise QuantizeError(f"the weight is already stored as {stored}; nothing to do")
    V, H = weight.shape
    half = np.empty((V, H), dtype)
    errors = np.empty(V, np.float64)
    for rows in _row_slices(V, H):
        exact = weight[rows].astype(np.float32, copy=False)
        with np.errstate(over="ignore"):
            half[rows] = exact.astype(dtype)
        wide = np.flatnonzero(~np.isfinite(half[rows].astype(np.float32)).all(axis=1)) + rows.start
        if len(wide):
            largest = _LARGEST_HALF[name]
            raise QuantizeError(
                f"the weight holds values that {name} cannot hold (largest ±{largest:.6g}), "
                f"first in row {wide[0]}; use --head int8"
            )
        errors[rows] = _relative(exact, half[rows].astype(np.float32))
    return StoredWeight({name: half}, errors)


def _half(name: str, dtype: Any) -> Format:
    def restore(values: Mapping[str, ir.Value], block: int) -> ir.Node:
        del block
        return ir.node("Cast", [values[name]], {"to": ir.DataType.FLOAT})

    return Format(None, partial(_store_half, name, dtype), restore)


def _store_fp8(weight: Array, block: int, rounder: Rounder) -> StoredWeight:
    # S_v = max|W_v| / 448, 1 for a zero row; the largest number of e4m3 is 448.
    del block, rounder
    V, H = weight.shape
    stored = np.empty((V, H), ml_dtypes.float8_e4m3fn)
    scale = np.empty(V, np.float32)
    errors = np.empty(V, np.float64)
    for rows in _row_slices(V, H):
        refuse_non_finite(weight[rows], rows.start)
        exact = weight[rows].astype(np.float32, copy=False)
        largest = np.abs(exact).max(axis=1)
        step = np.maximum(largest / np.float32(_LARGEST_FP8), np.finfo(np.float32).tiny)
        scale[rows] = np.where(largest == 0, np.float32(1), step)
        ratio = np.clip(exact / scale[rows, None], -_LARGEST_FP8, _LARGEST_FP8)
        stored[rows] = ratio.astype(ml_dtypes.float8_e4m3fn)
        errors[rows] = _relative(exact, stored[rows].astype(np.float64) * scale[rows, None])
    return StoredWeight({"fp8": stored, "scale": scale}, errors)


def _restore_fp8(values: Mapping[str, ir.Value], block: int) -> ir.Node:
    del block
    return ir.node("DequantizeLinear", [values["fp8"], values["scale"]], {"axis": 0})


def _row_slices(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // width)
    for start in track(range(0, rows, step), "rounding weights", unit="chunk"):
        yield slice(start, min(start + step, rows))


def _relative(weight: Array, stored: Array) -> npt.NDArray[np.float64]:
    exact = weight.astype(np.float64)
    lost = np.linalg.norm(exact - stored, axis=1)
    norm = np.linalg.norm(exact, axis=1)
    relative: npt.NDArray[np.float64] = np.zeros_like(lost)
    np.divide(lost, norm, out=relative, where=norm > 0)
    return relative


_INT8_BLOCKS, _INT4_BLOCKS = (64, 16, 32, 128, 256), (32, 16, 64, 128)

FORMATS = {
    "int8": _Integers(GRIDS["int8"], "int8", np.int8).format(_INT8_BLOCKS, 64, certifiable=True),
    "int8-row": _Integers(GRIDS["int8"], "int8", np.int8, per_row=True).format((), 64),
    "int4": _Integers(GRIDS["int4"], "int4", ml_dtypes.int4).format(_INT4_BLOCKS, 256),
    "int4-positive": _Integers(GRIDS["int4-positive"], "int4", ml_dtypes.int4).format(
        _INT4_BLOCKS, 256
    ),
    "uint4": _Integers(GRIDS["uint4"], "uint4", ml_dtypes.uint4).format(_INT4_BLOCKS, 256),
    "fp16": _half("fp16", np.float16),
    "bf16": _half("bf16", ml_dtypes.bfloat16),
    "fp8": Format(None, _store_fp8, _restore_fp8),
}
