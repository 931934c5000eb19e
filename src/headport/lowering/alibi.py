"""ALiBi as the additive bias of ONNX Runtime's attention.

    slopes [H]  →  slope · (slot − position of the query), [B, H, T, total_sequence_length]

Caches are compact, so a slot's index is its token's position. Rounded slopes repeat a model that
multiplies in bfloat16: bf16(slope · bf16(position)), scaled like the scores.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from headport.lowering.emit import Emitter
from headport.lowering.in_place import graph_input
from headport.lowering.positions import step_positions

__all__ = ["linear_bias"]


def linear_bias(
    model: ir.Model, emit: Emitter, slopes: ir.Value, q: ir.Value, rounded_scale: float | None
) -> ir.Value:
    """Emit the bias of one layer.

    Args:
        model: A backbone with the inputs of a step.
        emit: Writes in front of the layer's attention.
        slopes: [H].
        q: Gives the bias its type.
        rounded_scale: Scale of the scores where slopes are rounded; None where they are exact.
    """
    slots = emit.op(
        "Cast", [graph_input(model, "total_sequence_length")], "slots", to=ir.DataType.INT64
    )
    zero, one = emit.scalar(0, np.int64), emit.scalar(1, np.int64)
    slot = emit.op("Range", [zero, slots, one], "slot")
    query = emit.op("Unsqueeze", [step_positions(model), emit.ints(1, 3)], "query_position")
    column = emit.op("Unsqueeze", [slopes, emit.ints(0, 2, 3)], "slopes_column")
    steep = emit.op("Cast", [column], "slopes_float", to=ir.DataType.FLOAT)
    if rounded_scale is None:
        distance = emit.op("Sub", [slot, query], "distance")
        typed = emit.op("Cast", [distance], "distance_float", to=ir.DataType.FLOAT)
        bias = emit.op("Mul", [steep, typed], "linear")
    else:
        ends = [_rounded(emit, steep, x, name) for x, name in ((slot, "key"), (query, "query"))]
        apart = emit.op("Sub", ends, "linear")
        bias = emit.op("Mul", [apart, emit.scalar(rounded_scale, np.float32)], "linear_scaled")
    return emit.op("CastLike", [bias, q], "bias")


def _rounded(emit: Emitter, slopes: ir.Value, position: ir.Value, name: str) -> ir.Value:
    # bf16(slope · bf16(position)) as float.
    for step in ("position", "product"):
        half = emit.op("Cast", [position], f"{name}_{step}_rounded_bf16", to=ir.DataType.BFLOAT16)
        position = emit.op("Cast", [half], f"{name}_{step}_rounded", to=ir.DataType.FLOAT)
        if step == "position":
            position = emit.op("Mul", [slopes, position], f"{name}_linear")
    return position
