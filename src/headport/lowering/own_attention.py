"""Attention by headport's own kernel in place of ONNX Runtime's.

    GroupQueryAttention(q, k?, v?, past_key, past_value, seqlens_k, …, cos?, sin?, …, query_seqlens)
      →  CachedAttention(q, k?, v?, past_key, past_value, seqlens_k, query_seqlens, cos?, sin?)

The plain form alone: no window, bias, sink or softcap, whole heads rotated as two halves. What has
more keeps ONNX Runtime's operator.
"""

from __future__ import annotations

import onnx_ir as ir

from headport.kernels import ATTENTION, DOMAIN, VERSION
from headport.lowering.emit import CONTRIB, Emitter, attribute, replace
from headport.lowering.match import Match

__all__ = ["adopt_attention"]

_WAS = "GroupQueryAttention"
_Q, _K, _V, _PAST_KEY, _PAST_VALUE, _LENGTHS, _TOTAL, _COS, _SIN = range(9)
_QUERY_SEQLENS = 16
# Attributes by the values that the kernel computes; `scale` it takes as it is.
_PLAIN = {
    "local_window_size": -1,
    "rotary_interleaved": 0,
    "softcap": 0.0,
    "smooth_softmax": 0,
    "qk_output": 0,
}
_SIZES = {"num_heads", "kv_num_heads", "scale", "do_rotary"}


def adopt_attention(model: ir.Model) -> list[Match]:
    """Give every attention of the plain form the own kernel."""
    matches = []
    for index, node in enumerate([n for n in model.graph if _is_attention(n)]):
        fault = _fault(node)
        if not fault:
            _adopt(model, node)
        became = None if fault else ATTENTION
        matches.append(Match(f"attention layer {index}", _WAS, became, f"it has {fault}"))
    return matches


def _is_attention(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == (CONTRIB, _WAS)


def _input(node: ir.Node, place: int) -> ir.Value | None:
    return node.inputs[place] if place < len(node.inputs) else None


def _fault(node: ir.Node) -> str:
    known = {*range(9), _QUERY_SEQLENS}
    more = [v.name for n, v in enumerate(node.inputs) if n not in known and v is not None]
    if more:
        return f"the input {more[0]}"
    for name in node.attributes:
        if name not in _SIZES and attribute(node, name, None) != _PLAIN.get(name):
            return f"{name} {attribute(node, name, None)}"
    if _input(node, _QUERY_SEQLENS) is None:
        return "rows of one length only"
    past = _input(node, _PAST_KEY)
    if past is None or past.dtype != ir.DataType.FLOAT:
        return f"caches of type {past.dtype if past is not None else None}"
    if attribute(node, "scale", 0.0) <= 0:
        return "no scale"
    return _rotation_fault(node, past)


def _rotation_fault(node: ir.Node, past: ir.Value) -> str:
    cos = _input(node, _COS)
    if bool(attribute(node, "do_rotary", 0)) != (cos is not None):
        return "rotations without a table"
    if cos is None:
        return ""
    size, half = (v.shape[-1] if v.shape is not None else None for v in (past, cos))
    if not (isinstance(size, int) and isinstance(half, int) and 2 * half == size):
        return f"rotations of {half} pairs in heads of {size}"
    return ""


def _adopt(model: ir.Model, node: ir.Node) -> None:
    places = (_Q, _K, _V, _PAST_KEY, _PAST_VALUE, _LENGTHS, _QUERY_SEQLENS, _COS, _SIN)
    names = [value.name or "" for value in node.outputs]
    made = Emitter(model.graph, node, names[0]).ops(
        ATTENTION,
        [_input(node, place) for place in places],
        ["own", "own_key", "own_value"],
        domain=DOMAIN,
        num_heads=attribute(node, "num_heads", 0),
        kv_num_heads=attribute(node, "kv_num_heads", 0),
        scale=attribute(node, "scale", 0.0),
    )
    model.opset_imports[DOMAIN] = VERSION
    replace(model.graph, node, made)
