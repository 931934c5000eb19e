"""A head as TensorRT multiplies it: in the type that the hidden states come in.

    Gemm(Cast<float>(x), Cast<float>(W))                    x, W float16
      →  Cast<float>(Gemm(x, W))
    Gemm(Cast<float>(x), DequantizeLinear(Q, S), b?)        x float16
      →  Cast<float>(Gemm(x, Cast<float16>(DequantizeLinear(Q, S)))) + b

TensorRT folds a widened constant before it looks at it, so a float16 weight that is cast to float32
would take twice its bytes in the plan; and it refuses products of mixed types. Scales stay float32:
those of small rows have no float16. Logits are float32 again, what was rounded to half stays so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from headport.errors import LoweringError
from headport.lowering.emit import Emitter, attribute, replace
from headport.lowering.match import Match
from headport.manifest import Head
from headport.static_rounding import is_static

__all__ = ["computes_in_half", "lower_head"]

_HALF, _FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
# Formats that TensorRT has no kernel for → what to do.
_REFUSED = {
    "zero points": "TensorRT reads integers without zero points; quantise with --positive-scales "
    "in place of --asymmetric",
    "scales below 0": "TensorRT reads integers with positive scales alone; quantise with "
    "--positive-scales",
    "candidates": "it scores candidates in float64, which TensorRT has no kernel for; quantise "
    "without --rescore and --certify, and lower with --top-k for candidates in the graph",
}


def lower_head(model: ir.Model, head: Head, name: str) -> list[Match]:
    """Multiply in the hidden states' own type.

    Args:
        model: The head's graph; changed in place.
        head: Its manifest entry.
        name: The head's name, for messages.

    Raises:
        LoweringError: If TensorRT could not multiply with the weight as it is stored.
    """
    where = f"head {name}"
    quantization = head.quantization
    found = {
        "zero points": quantization is not None and not quantization.symmetric,
        "scales below 0": any(constant.min() < 0 for constant in _scales(model)),
        "candidates": head.outputs == "candidates",
    }
    for what, holds in found.items():
        if holds:
            raise LoweringError(f"{where}: {_REFUSED[what]}")
    if is_static(head):
        # INT8 products are scaled in float32, so nothing is left for half precision to speed up.
        return [Match(where, "Gemm", None, "INT8 is multiplied with INT8")]
    product = _product(model, where)
    x = _hidden_states(product)
    if x.dtype != _HALF:
        shown = "an unknown type" if x.dtype is None else x.dtype.name.lower()
        return [Match(where, "Gemm", None, f"its hidden states are {shown}")]
    weight = _weight(model.graph, product)
    if weight is None:
        return [Match(where, "Gemm", None, "its weight is not stored in a type of TensorRT's")]
    _lower(model.graph, product, x, weight)
    was = "DequantizeLinear + Gemm" if quantization is not None else "Gemm"
    return [Match(where, f"float32 {was}", f"float16 {was}")]


def _scales(model: ir.Model) -> Iterator[npt.NDArray[Any]]:
    for node in model.graph:
        scale = node.inputs[1] if node.op_type == "DequantizeLinear" else None
        if scale is not None and scale.const_value is not None:
            yield scale.const_value.numpy()


def computes_in_half(model: ir.Model) -> bool:
    """Whether a head's product is in half precision."""
    return any(n.op_type == "Gemm" and n.outputs[0].dtype == _HALF for n in model.graph)


def _product(model: ir.Model, where: str) -> ir.Node:
    products = [node for node in model.graph if node.op_type == "Gemm" and not node.domain]
    if len(products) != 1 or attribute(products[0], "transB", 0) != 1:
        raise LoweringError(f"{where}: one Gemm(transB=1) was expected, {len(products)} found")
    return products[0]


def _hidden_states(product: ir.Node) -> ir.Value:
    """What the product multiplies, before it was widened."""
    value = product.inputs[0]
    assert value is not None
    node = value.producer()
    if node is not None and node.op_type == "Cast":
        value = node.inputs[0]
        assert value is not None
    return value


def _weight(graph: ir.Graph, product: ir.Node) -> ir.Value | None:
    """The weight [V, H] in float16, from what the product reads in float32."""
    given = product.inputs[1]
    assert given is not None
    node = given.producer()
    if node is None:
        return None
    if node.op_type == "Cast":
        stored = node.inputs[0]
        return stored if stored is not None and stored.dtype == _HALF else None
    assert node.op_type == "DequantizeLinear", node.op_type
    return _cast(Emitter(graph, product, "head"), given, "weight.half", _HALF)


def _lower(graph: ir.Graph, product: ir.Node, x: ir.Value, weight: ir.Value) -> None:
    emit = Emitter(graph, product, "head")
    half = emit.op("Gemm", [x, weight], "product.half", transB=1)
    half.dtype = _HALF
    half.shape = product.outputs[0].shape
    logits = _cast(emit, half, "product.float", _FLOAT)
    if len(product.inputs) > 2 and product.inputs[2] is not None:
        logits = emit.op("Add", [logits, product.inputs[2]], "product.biased")
    old = [value.producer() for value in product.inputs[:2] if value is not None]
    replace(graph, product, [logits])
    for node in old:
        if node is not None and not any(o.uses() for o in node.outputs):
            graph.remove(node, safe=True)


def _cast(emit: Emitter, value: ir.Value, name: str, dtype: ir.DataType) -> ir.Value:
    found = emit.op("Cast", [value], name, to=dtype)
    found.dtype = dtype
    found.shape = value.shape
    return found
