"""The formats a head's weight can be stored in, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.errors import QuantizeError
from headport.progress import track
from headport.quantize.blocks import dequantize_blocks, quantize_blocks

__all__ = ["FORMATS", "Format", "StoredWeight"]

Array = npt.NDArray[Any]
_CHUNK_ELEMENTS = 1 << 22  # weights worked on at a time: 16 MB as float32


@dataclass(frozen=True)
class StoredWeight:
    """A weight as it will be stored, and what rounding did to it."""

    tensors: dict[str, Array]  # by suffix; the first is the weight itself
    row_errors: npt.NDArray[np.float64]  # [V], ‖W_v − Ŵ_v‖ / ‖W_v‖, 0 for a zero row

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(array.nbytes for array in self.tensors.values())


@dataclass(frozen=True)
class Format:
    """How a weight is stored and how a graph gets float32 back from it."""

    has_blocks: bool
    store: Callable[[Array, int], StoredWeight]  # (W [V, H], block) → stored
    # (stored values by suffix, block) → node whose output is Ŵ [V, H] float32
    restore: Callable[[Mapping[str, ir.Value], int], ir.Node]


def _store_int8(weight: Array, block: int) -> StoredWeight:
    V, H = weight.shape
    rounded = np.empty((V, H), np.int8)
    scale = np.empty((V, -(-H // block)), np.float32)
    errors = np.empty(V, np.float64)
    for rows in _row_slices(V, H):
        rounded[rows], scale[rows] = quantize_blocks(weight[rows], block, rows.start)
        errors[rows] = _relative(weight[rows], dequantize_blocks(rounded[rows], scale[rows], block))
    return StoredWeight({"int8": rounded, "scale": scale}, errors)


def _restore_int8(values: Mapping[str, ir.Value], block: int) -> ir.Node:
    attributes = {"axis": 1, "block_size": block}
    return ir.node("DequantizeLinear", [values["int8"], values["scale"]], attributes)


def _store_fp16(weight: Array, block: int) -> StoredWeight:
    del block
    if weight.dtype == np.float16:
        raise QuantizeError("the head's weight is already stored as float16; nothing to do")
    V, H = weight.shape
    half = np.empty((V, H), np.float16)
    errors = np.empty(V, np.float64)
    for rows in _row_slices(V, H):
        exact = weight[rows].astype(np.float32, copy=False)
        with np.errstate(over="ignore"):
            half[rows] = exact.astype(np.float16)
        wide = np.flatnonzero(~np.isfinite(half[rows]).all(axis=1)) + rows.start
        if len(wide):
            raise QuantizeError(
                f"the head's weight holds values that float16 cannot hold (largest ±65504), "
                f"first in row {wide[0]}; use --head int8"
            )
        errors[rows] = _relative(exact, half[rows])
    return StoredWeight({"fp16": half}, errors)


def _restore_fp16(values: Mapping[str, ir.Value], block: int) -> ir.Node:
    del block
    return ir.node("Cast", [values["fp16"]], {"to": ir.DataType.FLOAT})


def _row_slices(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // width)
    for start in track(range(0, rows, step), "rounding the head", unit="chunk"):
        yield slice(start, min(start + step, rows))


def _relative(weight: Array, stored: Array) -> npt.NDArray[np.float64]:
    exact = weight.astype(np.float64)
    lost = np.linalg.norm(exact - stored, axis=1)
    norm = np.linalg.norm(exact, axis=1)
    relative: npt.NDArray[np.float64] = np.zeros_like(lost)
    np.divide(lost, norm, out=relative, where=norm > 0)
    return relative


FORMATS = {
    "int8": Format(has_blocks=True, store=_store_int8, restore=_restore_int8),
    "fp16": Format(has_blocks=False, store=_store_fp16, restore=_restore_fp16),
}
