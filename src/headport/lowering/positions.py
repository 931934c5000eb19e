"""Positions from the lengths of a step instead of a mask.

    headport::Positions(attention_mask, input_ids)
      →  min(P[:, None] + arange(T), seqlens_k[:, None]),  P = seqlens_k + 1 − query_seqlens

P is the number of tokens a row held before the step. The minimum gives padding the position of the
row's last token, as the portable form does, so a table of learned positions is never read past its
end. A backbone with an input `position_ids` takes them from there.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from headport.lowering.emit import Emitter, replace
from headport.lowering.in_place import graph_input
from headport.lowering.match import Match

__all__ = ["lower_positions", "step_positions"]

_NAME = "headport.position_ids"


def lower_positions(model: ir.Model) -> list[Match]:
    """Replace every call of `headport::Positions`."""
    calls = [n for n in model.graph if (n.domain, n.op_type) == ("headport", "Positions")]
    for call in calls:
        replace(model.graph, call, [step_positions(model)])
    became = "seqlens_k, query_seqlens" if _given(model) is None else "position_ids"
    return [Match("backbone", "Positions", became) for _ in calls]


def _given(model: ir.Model) -> ir.Value | None:
    return next((v for v in model.graph.inputs if v.name == "position_ids"), None)


def step_positions(model: ir.Model) -> ir.Value:
    """position_ids int64 [batch, sequence] of a step; computed once per graph."""
    graph, given = model.graph, _given(model)
    if given is not None:
        return given
    for node in graph:
        if node.outputs and node.outputs[0].name == _NAME:
            return node.outputs[0]
    emit = Emitter(graph, graph[0], "headport")
    one, zero = emit.scalar(1, np.int64), emit.scalar(0, np.int64)
    wide = [
        emit.op("Cast", [graph_input(model, name)], f"{name}.int64", to=ir.DataType.INT64)
        for name in ("seqlens_k", "query_seqlens")
    ]
    last, new = (emit.op("Unsqueeze", [v, emit.ints(1)], f"{v.name}.column") for v in wide)
    held = emit.op("Sub", [emit.op("Add", [last, one], "tokens_after"), new], "tokens_before")
    width = emit.op("Shape", [graph_input(model, "input_ids")], "width", start=1, end=2)
    count = emit.op("Squeeze", [width], "width.scalar")
    steps = emit.op("Range", [zero, count, one], "steps")
    positions = emit.op("Add", [held, steps], "unbounded_position_ids")
    bounded = emit.op("Min", [positions, last], "bounded_position_ids")
    return emit.op("Max", [bounded, zero], _NAME.removeprefix("headport."))
