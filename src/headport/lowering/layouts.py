"""Removing layouts that are undone at once.

    Transpose(Transpose(x))            →  x      where the second puts the axes back
    Reshape(Reshape(x)), shape of x    →  x

A model splits heads off and turns them to the front; the fused attention operator wants them flat
again. What lies between then does nothing.
"""

from __future__ import annotations

import onnx_ir as ir

from headport.lowering.emit import attribute, replace
from headport.lowering.match import Match

__all__ = ["same_shape", "straighten"]


def straighten(model: ir.Model) -> list[Match]:
    """Remove every pair; what both read stays where something else reads it as well."""
    matches: list[Match] = []
    for node in list(model.graph):
        source = _SOURCES.get(node.op_type, _no_source)(node) if not node.domain else None
        if source is None or node.outputs[0].is_graph_output():
            continue
        shape, kind = source.shape, source.type
        replace(model.graph, node, [source])
        source.shape, source.type = shape, kind
        matches.append(Match("backbone", f"{node.op_type} pair that does nothing", "nothing"))
    return matches


def _no_source(_: ir.Node) -> None:
    return None


def _before_transposes(node: ir.Node) -> ir.Value | None:
    first = node.inputs[0].producer() if node.inputs[0] is not None else None
    if first is None or first.op_type != "Transpose" or first.domain:
        return None
    inner, outer = attribute(first, "perm", None), attribute(node, "perm", None)
    if inner is None or outer is None or [inner[axis] for axis in outer] != list(range(len(outer))):
        return None
    return first.inputs[0]


def _before_reshapes(node: ir.Node) -> ir.Value | None:
    first = node.inputs[0].producer() if node.inputs[0] is not None else None
    if first is None or first.op_type != "Reshape" or first.domain:
        return None
    source, shape = first.inputs[0], node.outputs[0].shape
    return source if source is not None and same_shape(source.shape, shape) else None


def same_shape(one: ir.Shape | None, other: ir.Shape | None) -> bool:
    """Whether two shapes are known to be equal."""
    if one is None or other is None:
        return False
    # Two unnamed dimensions need not be the same.
    return one == other and all(isinstance(dim, int) or dim.value is not None for dim in one)


_SOURCES = {"Transpose": _before_transposes, "Reshape": _before_reshapes}
