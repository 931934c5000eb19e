"""Relative positions as the additive bias of ONNX Runtime's attention.

    relative [R, H]  →  relative[min(max(position of the query − slot, 0), R − 1)], [B, H, T, slots]

Caches are compact, so a slot's index is its token's position. Layers that share a table share the
bias.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from headport.lowering.emit import Emitter
from headport.lowering.in_place import graph_input
from headport.lowering.positions import step_positions

__all__ = ["relative_bias"]

_NAME = "relative_bias"


def relative_bias(model: ir.Model, table: ir.Value, q: ir.Value, anchor: ir.Node) -> ir.Value:
    """The bias of a table, computed once per graph.

    Args:
        model: A backbone with the inputs of a step.
        table: [R, H].
        q: Gives the bias its type.
        anchor: The first attention that needs it, in front of which it is written.
    """
    prefix = f"headport.{table.name}"
    for node in model.graph:
        if node.outputs and node.outputs[0].name == f"{prefix}.{_NAME}":
            return node.outputs[0]
    emit = Emitter(model.graph, anchor, prefix)
    zero, one = emit.scalar(0, np.int64), emit.scalar(1, np.int64)
    assert table.shape is not None
    farthest = emit.scalar(int(table.shape.numpy()[0]) - 1, np.int64)
    total = graph_input(model, "total_sequence_length")
    slots = emit.op("Cast", [total], "slots", to=ir.DataType.INT64)
    slot = emit.op("Range", [zero, slots, one], "slot")
    query = emit.op("Unsqueeze", [step_positions(model), emit.ints(2)], "query_position")
    behind = emit.op("Max", [emit.op("Sub", [query, slot], "apart"), zero], "behind")
    distance = emit.op("Min", [behind, farthest], "distance")
    found = emit.op("Gather", [table, distance], "looked_up", axis=0)
    per_head = emit.op("Transpose", [found], "per_head", perm=[0, 3, 1, 2])
    return emit.op("CastLike", [per_head, q], _NAME)
