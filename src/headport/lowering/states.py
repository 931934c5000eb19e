"""Recurrent layers, whose states are of one size from the start and need no cache in place.

    headport::NewTokens(attention_mask, input_ids)
      →  Cast(arange(T) < query_seqlens[:, None])

Rows are right-padded, so the first tokens of a row are its new ones. The recurrences themselves
stay calls of their portable functions: ONNX Runtime runs those as they are.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from headport.lowering.emit import Emitter, replace
from headport.lowering.in_place import RECURRENCES, graph_input
from headport.lowering.match import Match

__all__ = ["lower_states"]


def lower_states(model: ir.Model) -> list[Match]:
    """Replace every call of `NewTokens`, and say which recurrences stay as they are."""
    graph = model.graph
    for call in [n for n in graph if (n.domain, n.op_type) == ("headport", "NewTokens")]:
        replace(graph, call, [_new_tokens(model, call)])
    kept = [n for n in graph if n.domain == "headport" and n.op_type.startswith(RECURRENCES)]
    return [Match(_layer(n), n.op_type, None, "ONNX Runtime runs its definition") for n in kept]


def _layer(node: ir.Node) -> str:
    # Its second output is a state, whose port is named after the layer.
    return f"layer {(node.outputs[1].name or '').rpartition('.')[2]}"


def _new_tokens(model: ir.Model, call: ir.Node) -> ir.Value:
    emit = Emitter(model.graph, call, "headport")
    zero, one = emit.scalar(0, np.int64), emit.scalar(1, np.int64)
    width = emit.op("Shape", [graph_input(model, "input_ids")], "step_width", start=1, end=2)
    slots = emit.op("Range", [zero, emit.op("Squeeze", [width], "step_slots"), one], "step_slot")
    new = emit.op("Cast", [graph_input(model, "query_seqlens")], "new", to=ir.DataType.INT64)
    column = emit.op("Unsqueeze", [new, emit.ints(1)], "new_column")
    valid = emit.op("Less", [slots, column], "is_new")
    return emit.op("Cast", [valid], "new_tokens", to=ir.DataType.INT64)
