"""A residual sum and the norm behind it in one operator.

s = Add(a, b);  y = RMSNormalization(s, weight)
  →  y, _, _, s = com.microsoft::SkipSimplifiedLayerNormalization(a, b, weight)
"""

from __future__ import annotations

import onnx_ir as ir

from headport.lowering.emit import CONTRIB, Emitter, attribute, replace
from headport.lowering.layouts import same_shape
from headport.lowering.match import Match

__all__ = ["fuse_skip_norms"]

_OPERATOR = "SkipSimplifiedLayerNormalization"
_DIMS = 3  # the operator's CPU kernel takes [batch, sequence, size]
_EPSILON = 1e-5  # RMSNormalization's default


def fuse_skip_norms(model: ir.Model) -> list[Match]:
    """Replace every pair whose sum has the shape of both its terms."""
    matches: list[Match] = []
    for norm in [n for n in model.graph if n.op_type == "RMSNormalization" and not n.domain]:
        total = norm.inputs[0]
        add = total.producer() if total is not None else None
        if total is None or add is None or not _fits(norm, add):
            continue
        emit = Emitter(model.graph, add, norm.name or norm.outputs[0].name or "norm")
        y, _, _, summed = emit.ops(
            _OPERATOR,
            [*add.inputs, norm.inputs[1]],
            ("normed", "mean", "inv_std_var", "sum"),
            domain=CONTRIB,
            epsilon=float(attribute(norm, "epsilon", _EPSILON)),
        )
        unused = y.producer()
        assert unused is not None
        for index in (1, 2):
            unused.outputs[index].name = ""
        replace(model.graph, norm, [y])
        replace(model.graph, add, [summed])
        matches.append(Match("backbone", "Add + RMSNormalization", _OPERATOR))
    if matches:
        model.opset_imports[CONTRIB] = 1
    return matches


def _fits(norm: ir.Node, add: ir.Node) -> bool:
    weight, total = norm.inputs[1], add.outputs[0]
    if add.op_type != "Add" or add.domain or total.is_graph_output() or weight is None:
        return False
    # A term that is spread over the other would be read beyond its end.
    same = all(v is not None and same_shape(v.shape, total.shape) for v in add.inputs)
    last_axis = attribute(norm, "axis", -1) in (-1, _DIMS - 1)
    fits = same and total.shape is not None and len(total.shape) == _DIMS
    return fits and last_axis and weight.dtype == total.dtype and weight.is_initializer()
