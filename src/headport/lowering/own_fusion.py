"""What goes before and after a product of headport's own kernel, taken into the same node.

    SkipSimplifiedLayerNormalization(x, skip, gamma) → normed, sum;  BlockMatMul(normed, W, S)
    RMSNormalization(x, gamma) → normed;                             BlockMatMul(normed, W, S)
      →  BlockMatMul(x, W, S, skip?, gamma) → y, sum?, normed?

    Split(BlockMatMul(…)) → g, u;  g · Sigmoid(g) · u  or  Gelu(g, tanh) · u
      →  BlockMatMul(…, activation) → y

Between two products of one row lies little arithmetic and, in a graph, a node for every step of it,
whose start costs more. What is computed stays the same formula in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from headport.kernels import DOMAIN, GAMMA, NORMED, PRODUCT, PRODUCT_INPUTS, SKIP, SUM
from headport.lowering.emit import CONTRIB, attribute, replace
from headport.lowering.match import Match

__all__ = ["fuse_gates", "fuse_norms"]

_SKIP_NORM, _NORM = "SkipSimplifiedLayerNormalization", "RMSNormalization"
_SKIP_NORM_SUM = 3  # which of its outputs
_EPSILON = 1e-5  # the default of both


def fuse_norms(model: ir.Model) -> list[Match]:
    """Take root mean square norms into the first product that reads each."""
    matches = []
    for node in [n for n in model.graph if _is_norm(n)]:
        product = _first_product(model.graph, node.outputs[0])
        if product is not None and _is_as_wide(node, product):
            _fuse_norm(model.graph, node, product)
            matches.append(Match(f"norm before {product.name}", node.op_type, PRODUCT))
    if matches:
        model.graph.sort()  # what reads a sum may stand before the product that makes it now
    return matches


def fuse_gates(model: ir.Model) -> list[Match]:
    """Take the gate of a feed-forward layer into the product that gives both of its halves."""
    matches = []
    for node in [n for n in model.graph if _is_own(n)]:
        found = _gate(node)
        if found is not None:
            activation, end = found
            _fuse_gate(model.graph, node, activation, end)
            matches.append(Match(f"gate after {node.name}", f"{activation} gate", PRODUCT))
    return matches


def _is(node: ir.Node, op_type: str) -> bool:
    return (node.domain, node.op_type) == ("", op_type)


def _is_own(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, PRODUCT)


def _is_norm(node: ir.Node) -> bool:
    if (node.domain, node.op_type) not in ((CONTRIB, _SKIP_NORM), ("", _NORM)):
        return False
    x, gamma = node.inputs[0], node.inputs[-1]
    floats = {v.dtype for v in (x, node.outputs[0]) if v is not None and v.dtype is not None}
    if floats != {ir.DataType.FLOAT} or any(v.is_graph_output() for v in node.outputs):
        return False
    if gamma is None or not gamma.is_initializer() or gamma.dtype != ir.DataType.FLOAT:
        return False
    if node.op_type == _SKIP_NORM:
        # No bias, and of its outputs the norm and the sum alone.
        return len(node.inputs) == 3 and not any(list(v.uses()) for v in node.outputs[1:3])
    return (attribute(node, "axis", -1), attribute(node, "stash_type", 1)) == (-1, 1)


def _is_as_wide(norm: ir.Node, product: ir.Node) -> bool:
    gamma = norm.inputs[2 if norm.op_type == _SKIP_NORM else 1]
    shape = gamma.shape if gamma is not None else None
    return shape is not None and list(shape) == [attribute(product, "K", 0)]


def _first_product(graph: ir.Graph, normed: ir.Value) -> ir.Node | None:
    readers = {id(use.node) for use in normed.uses() if use.idx == 0 and _is_own(use.node)}
    others = {id(use.node) for use in normed.uses() if use.idx != 0}
    for node in graph:
        if id(node) in readers - others and len(node.inputs) < PRODUCT_INPUTS:
            return node
    return None


def _fuse_norm(graph: ir.Graph, norm: ir.Node, product: ir.Node) -> None:
    has_skip = norm.op_type == _SKIP_NORM
    x, gamma = norm.inputs[0], norm.inputs[2 if has_skip else 1]
    product.resize_inputs(PRODUCT_INPUTS)
    product.replace_input_with(0, x)
    product.replace_input_with(SKIP, norm.inputs[1] if has_skip else None)
    product.replace_input_with(GAMMA, gamma)
    product.attributes["epsilon"] = ir.AttrFloat32("epsilon", attribute(norm, "epsilon", _EPSILON))
    old = {NORMED: norm.outputs[0]}
    if has_skip and len(norm.outputs) > _SKIP_NORM_SUM:
        old[SUM] = norm.outputs[_SKIP_NORM_SUM]
    used = {place: value for place, value in old.items() if list(value.uses())}
    product.resize_outputs(1 + max(used, default=0))
    for place, value in used.items():
        name, new = value.name, product.outputs[place]
        value.name, new.name = f"{name}.replaced", name
        new.type, new.shape = value.type, value.shape
        ir.convenience.replace_all_uses_with(value, new)
    for place, value in enumerate(product.outputs):
        if place not in (0, *used):
            value.name = ""
    graph.remove(norm, safe=True)


def _users(value: ir.Value) -> list[ir.Node]:
    return [] if value.is_graph_output() else [use.node for use in value.uses()]


def _gate(product: ir.Node) -> tuple[str, ir.Node] | None:
    """The activation that a product's first half goes through, and where it meets the second."""
    match _users(product.outputs[0]):
        case [split] if _is(split, "Split") and len(split.outputs) == 2:
            pass
        case _:
            return None
    if not _halves(split, attribute(product, "N", 0)):
        return None
    if attribute(product, "activation", "") != "none":
        return None
    gate, up = split.outputs
    for name, activated in (("silu", _silu(gate)), ("gelu_tanh", _gelu(gate))):
        ends = _users(activated) if activated is not None else []
        if len(ends) == 1 and _is(ends[0], "Mul") and _users(up) == ends:
            return name, ends[0]
    return None


def _halves(split: ir.Node, width: int) -> bool:
    shape = split.inputs[0].shape if split.inputs[0] is not None else None
    last = {-1} if shape is None else {-1, len(shape) - 1}
    if attribute(split, "axis", 0) not in last or width % 2:
        return False
    given = split.inputs[1] if len(split.inputs) > 1 else None
    if given is None:  # two parts of one size
        return True
    counts = given.const_value
    return counts is not None and counts.numpy().tolist() == [width // 2, width // 2]


def _silu(gate: ir.Value) -> ir.Value | None:
    users = _users(gate)
    for sigmoid, product in (users, users[::-1]) if len(users) == 2 else ():
        if _is(sigmoid, "Sigmoid") and _is(product, "Mul"):
            met = _users(sigmoid.outputs[0])
            return product.outputs[0] if met == [product] else None
    return None


def _gelu(gate: ir.Value) -> ir.Value | None:
    match _users(gate):
        case [node] if _is(node, "Gelu") and attribute(node, "approximate", "none") == "tanh":
            return node.outputs[0]
    return None


def _fuse_gate(graph: ir.Graph, product: ir.Node, activation: str, end: ir.Node) -> None:
    product.attributes["activation"] = ir.AttrString("activation", activation)
    y = product.outputs[0]
    y.shape = end.outputs[0].shape
    inner = _between(product, end)
    name = end.outputs[0].name
    replace(graph, end, [y])
    y.name = name
    for node in inner:
        graph.remove(node, safe=True)


def _between(product: ir.Node, end: ir.Node) -> Sequence[ir.Node]:
    """The nodes of a gate but for its last, those that read before those that are read."""
    (split,) = _users(product.outputs[0])
    found = [split]
    for node in found:
        found += [n for v in node.outputs for n in _users(v) if n is not end and n not in found]
    return found[::-1]
