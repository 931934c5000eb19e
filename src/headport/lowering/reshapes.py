"""Targets of Reshape as constants, where they are only copies of the input's own dimensions.

    Reshape(x [batch, sequence, 576], Concat(Shape(ids)[0:1], Shape(ids)[1:2], 9, 64))
      →  Reshape(x, [0, 0, 9, 64])

A GPU leaves arithmetic on shapes to the CPU; without it there is none left.
"""

from __future__ import annotations

import onnx_ir as ir

from headport.lowering.emit import Emitter, attribute
from headport.lowering.match import Match

__all__ = ["fix_reshapes"]

_COPY, _REST = 0, -1


def fix_reshapes(model: ir.Model) -> list[Match]:
    """Replace every computed target that can be written down."""
    matches: list[Match] = []
    for node in list(model.graph):
        if node.op_type != "Reshape" or node.domain or node.inputs[1] is None:
            continue
        computed = node.inputs[1].producer()
        if computed is None or computed.op_type == "Constant":
            continue
        where = f"node {node.name or node.outputs[0].name}"
        target = _target(node, computed)
        if target is None:
            reason = "its target is not made of its input's own dimensions"
            matches.append(Match(where, "Reshape to a computed shape", None, reason))
            continue
        emit = Emitter(model.graph, node, "headport")
        node.replace_input_with(1, emit.ints(*target))
        node.attributes.pop("allowzero", None)
        matches.append(Match("backbone", "Reshape to a computed shape", "a constant one"))
    return matches


def _target(node: ir.Node, computed: ir.Node) -> list[int] | None:
    data = node.inputs[0]
    if computed.op_type != "Concat" or data is None or data.shape is None:
        return None
    target: list[int] = []
    for part in computed.inputs:
        value = None if part is None else _part(part, data.shape, len(target))
        if value is None:
            return None
        target.append(value)
    return target if target.count(_REST) <= 1 else None


def _part(part: ir.Value, shape: ir.Shape, place: int) -> int | None:
    """What may stand at `place` of the target: a number, 0 to copy the input's, -1 for the rest."""
    if part.const_value is not None:
        numbers = part.const_value.numpy().reshape(-1)
        # A zero would be read as "copy" once the target is a constant.
        return int(numbers[0]) if len(numbers) == 1 and numbers[0] != 0 else None
    source = part.producer()
    if source is None or source.op_type != "Shape" or source.inputs[0] is None:
        return None
    start, end = attribute(source, "start", 0), attribute(source, "end", None)
    measured = source.inputs[0].shape
    if measured is None or start < 0 or end != start + 1:
        return None
    dim = measured[start]
    if isinstance(dim, int):
        return dim
    if dim.value is not None and place < len(shape) and shape[place] == dim:
        return _COPY
    return _REST
