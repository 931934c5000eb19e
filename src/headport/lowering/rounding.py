"""Hidden states rounded block by block as an 8-bit kernel rounds them, written as graph nodes.

    s_k = max|x_k| / 127,   x₁ = round(x_k / s_k) · s_k,   r = x − x₁

A kernel that rounds its own input leaves x₁ as it is, so what it computes is the product with x₁,
and r is known instead of guessed at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from headport.lowering.emit import Emitter

__all__ = ["RoundedActivations", "round_activations"]


@dataclass(frozen=True)
class RoundedActivations:
    """x = first + rest; the same values whole, [N, H], and by blocks, [N, K, block]."""

    first: ir.Value
    blocks: ir.Value  # of x, filled up with zeros
    first_blocks: ir.Value


def round_activations(emit: Emitter, x: ir.Value, H: int, block: int) -> RoundedActivations:
    """Round x [N, H] to INT8 multiples of each block's step.

    Args:
        emit: Where the nodes go.
        x: float32 [N, H].
        H: Hidden size.
        block: Activations that share a step; the last block may be short.
    """
    count = -(-H // block)
    padded = x
    if count * block != H:
        padded = emit.op("Pad", [x, emit.ints(0, 0, 0, count * block - H)], "padded")
    blocks = emit.op("Reshape", [padded, emit.ints(0, count, block)], "blocks")
    size = emit.op("Abs", [blocks], "magnitudes")
    largest = emit.op("ReduceMax", [size, emit.ints(2)], "amax", keepdims=1)
    step = emit.op("Div", [largest, emit.scalar(127.0, np.float32)], "step")
    is_zero = emit.op("Equal", [step, emit.scalar(0.0, np.float32)], "step_is_zero")
    safe = emit.op("Where", [is_zero, emit.scalar(1.0, np.float32), step], "safe_step")
    whole = emit.op("Round", [emit.op("Div", [blocks, safe], "quotient")], "whole")
    first_blocks = emit.op("Mul", [whole, safe], "first_blocks")
    first = emit.op("Reshape", [first_blocks, emit.ints(0, count * block)], "first_padded")
    if count * block != H:
        first = emit.op("Slice", [first, emit.ints(0), emit.ints(H), emit.ints(1)], "first")
    return RoundedActivations(first, blocks, first_blocks)
