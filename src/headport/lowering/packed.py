"""Weights as ONNX Runtime's MatMulNBits reads them: unsigned, in blocks, low bits first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.lowering.emit import attribute

__all__ = ["ROW_BLOCK", "PackedWeight", "pack_weight"]

Array = npt.NDArray[Any]

# The operator knows blocks only: a scale per row is repeated for blocks of this size, which cost
# 3 % more bytes and are what its activations are rounded by.
ROW_BLOCK = 128
_BITS = {
    ir.DataType.INT8: 8,
    ir.DataType.UINT8: 8,
    ir.DataType.INT4: 4,
    ir.DataType.UINT4: 4,
}
_SIGNED = (ir.DataType.INT8, ir.DataType.INT4)


@dataclass(frozen=True)
class PackedWeight:
    """Ŵ = (Q − Z) · S, [V, H] with K = ceil(H / block)."""

    values: Array  # uint8 [V, K, block · bits / 8]
    scale: Array  # float32 [V, K]
    zero: Array | None  # uint8 [V, ceil(K · bits / 8)]; None: 2^(bits − 1) everywhere
    bits: int
    block: int


def pack_weight(restore: ir.Node) -> PackedWeight:
    """What a DequantizeLinear of constants gives back, as the operator wants it.

    Args:
        restore: DequantizeLinear with a scale per block along axis 1, or per row along axis 0.
    """
    whole, scale, *rest = (_constant(value) for value in restore.inputs)
    assert restore.inputs[0] is not None and restore.inputs[0].dtype is not None
    dtype = restore.inputs[0].dtype
    bits = _BITS[dtype]
    offset = 1 << (bits - 1) if dtype in _SIGNED else 0
    V, H = whole.shape
    block = int(attribute(restore, "block_size", 0)) or ROW_BLOCK
    count = -(-H // block)
    if scale.ndim == 1:
        scale = np.repeat(scale[:, None], count, axis=1)
    # Fill up with the zero point, so that what is added weighs nothing.
    zero = np.full((V, count), offset, np.uint8)
    if rest:
        zero = (rest[0].astype(np.int16) + offset).astype(np.uint8)
    full = np.repeat(zero, block, axis=1)
    full[:, :H] = (whole.astype(np.int16) + offset).astype(np.uint8)
    return PackedWeight(
        values=_pack(full, bits).reshape(V, count, block * bits // 8),
        scale=np.ascontiguousarray(scale, np.float32),
        zero=_pack(zero, bits) if rest else None,
        bits=bits,
        block=block,
    )


def _constant(value: ir.Value | None) -> Array:
    assert value is not None and value.const_value is not None
    return value.const_value.numpy()


def _pack(values: Array, bits: int) -> Array:
    """[V, n] uint8 → [V, ceil(n · bits / 8)], the first of two in the lower half."""
    if bits == 8:
        return values
    if values.shape[1] % 2:
        values = np.pad(values, ((0, 0), (0, 1)))
    packed: Array = values[:, ::2] | (values[:, 1::2] << 4)
    return packed
