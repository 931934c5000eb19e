"""What makes NaN of NaN behind a head's product, taken away where the product does it by itself.

    Sum(BlockMatMul(x), Σ_h 0 · x_h, b?)  →  Sum(BlockMatMul(x), b), or BlockMatMul(x) alone

ONNX Runtime's kernel turns NaN and infinity into numbers, headport's own does not. A sum over a
whole vocabulary is another pass over all logits, even a sum of one.
"""

from __future__ import annotations

import onnx_ir as ir

from headport.kernels import DOMAIN, PRODUCT
from headport.lowering.emit import Emitter, made_by, replace

__all__ = ["drop_guards"]


def drop_guards(graph: ir.Graph) -> None:
    """Rewrite every sum that a product of the own kernel goes into."""
    for node in [n for n in graph if (n.domain, n.op_type) == ("", "Sum")]:
        terms = [value for value in node.inputs if value is not None]
        if not any(made_by(value, PRODUCT, DOMAIN) for value in terms):
            continue
        kept = [value for value in terms if not _is_guard(value)]
        if len(kept) == 1:
            replace(graph, node, kept)
        elif len(kept) < len(terms):
            emit = Emitter(graph, node, node.outputs[0].name or "head")
            replace(graph, node, [emit.op("Sum", kept, "unguarded")])


def _is_guard(value: ir.Value) -> bool:
    """Whether it is Σ_h 0 · x_h."""
    summed = made_by(value, "ReduceSum")
    zeros = made_by(summed.inputs[0], "Mul") if summed is not None else None
    factor = zeros.inputs[1] if zeros is not None else None
    constant = factor.const_value if factor is not None else None
    return constant is not None and constant.size == 1 and float(constant.numpy()) == 0.0
