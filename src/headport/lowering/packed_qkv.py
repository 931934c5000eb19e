"""Query, key and value of attention as the one tensor they were computed in.

q, k, v = Split(x);  GroupQueryAttention(q, k, v, …)  →  GroupQueryAttention(x, –, –, …)

and headport's own kernel, which has the same three inputs, likewise.
"""

from __future__ import annotations

import onnx_ir as ir

from headport.kernels import ATTENTION, DOMAIN
from headport.lowering.emit import CONTRIB, attribute
from headport.lowering.match import Match

__all__ = ["pack_qkv"]

# By domain: the portable function has the name of the own kernel.
_OPERATORS = {(CONTRIB, "GroupQueryAttention"), (DOMAIN, ATTENTION)}


def pack_qkv(model: ir.Model) -> list[Match]:
    """Hand every attention the whole where a Split gives it exactly q, k and v in this order."""
    matches = []
    for node in [n for n in model.graph if (n.domain, n.op_type) in _OPERATORS]:
        split = node.inputs[0].producer() if node.inputs[0] is not None else None
        if split is None or not _gives_all(split, node):
            continue
        node.replace_input_with(0, split.inputs[0])
        node.replace_input_with(1, None)
        node.replace_input_with(2, None)
        model.graph.remove(split, safe=True)
        matches.append(Match("backbone", "Split into q, k, v", "packed q, k, v"))
    return matches


def _gives_all(split: ir.Node, attention: ir.Node) -> bool:
    if split.op_type != "Split" or split.domain or attribute(split, "axis", 0) != -1:
        return False
    given = [id(value) for value in attention.inputs[:3] if value is not None]
    return given == [id(value) for value in split.outputs] and all(
        len(list(value.uses())) == 1 for value in split.outputs
    )
