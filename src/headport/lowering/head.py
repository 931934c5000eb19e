"""A head of integers as ONNX Runtime's 8-bit and 4-bit kernels run it.

    Gemm(x, DequantizeLinear(Q, S), b?, transB=1)
      →  rounded:   MatMulNBits(x) + guard + b
         residual:  MatMulNBits([x₁; x − x₁]) split in two and added, + guard + b
         on CUDA:   MatMulNBits(x) + b, which rounds no activation

The kernel rounds each block of its input to INT8 with scale amax / 127. `residual` hands it two
rows for one: x₁, x already rounded that way, which the kernel's own rounding leaves as it is, and
the rest x − x₁, at most half a step, whose rounding is some 254 times finer. Weights are read once
for both.

The kernel turns NaN into a number; guard = Σ_h 0 · x_h is 0, or NaN where x holds NaN or infinity.
A head that gives candidates has none: their float64 logits, and its bounds, are NaN by themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from headport.errors import LoweringError
from headport.lowering.emit import CONTRIB, Emitter, attribute, replace
from headport.lowering.match import Match
from headport.lowering.packed import pack_weight
from headport.lowering.rounding import round_activations
from headport.manifest import Head

__all__ = ["INTEGERS", "lower_head", "lower_head_unrounded", "packed_name"]

_PATTERN = "DequantizeLinear + Gemm"
_OPERATOR = "MatMulNBits"
# accuracy_level: the least exact form activations may be brought to. CUDA's kernel rounds none.
_FLOAT_ACTIVATIONS, _INT8_ACTIVATIONS = 1, 4
INTEGERS = ("int8", "int8-row", "int4")  # formats that the operator multiplies with


def packed_name(weight: str) -> str:
    """Name of a lowered weight, from the name of its portable form."""
    return f"{weight}.nbits"


def lower_head(model: ir.Model, head: Head, name: str) -> list[Match]:
    """Give a head the fastest operator that keeps the activations it was quantised for.

    Args:
        model: The head's graph; changed in place.
        head: Its manifest entry.
        name: The head's name, for messages.

    Raises:
        LoweringError: If the manifest says integers and the graph does not have that form.
    """
    where = f"head {name}"
    if head.quantization is None:
        return [Match(where, "Gemm", None, "its weight is not quantised")]
    if head.quantization.format not in INTEGERS:
        reason = f"there is no faster operator for a weight stored as {head.quantization.format}"
        return [Match(where, "Gemm", None, reason)]
    product = _find_product(model, where)
    if head.quantization.activations == "exact":
        return [Match(where, _PATTERN, None, "exact activations were asked for")]
    if head.quantization.activations == "static":
        return [Match(where, _PATTERN, None, "its own graph rounds activations by one scale")]
    tail = _TAILS[head.quantization.activations]
    _lower(model, product, tail, _INT8_ACTIVATIONS, guarded=head.outputs == "logits")
    became = f"{_OPERATOR}, {head.quantization.activations} activations"
    return [Match(where, _PATTERN, became)]


def lower_head_unrounded(model: ir.Model, head: Head, name: str) -> list[Match]:
    """As `lower_head`, for a kernel that computes with the activations as they are.

    A head that was quantised for rounded activations is then more exact than it was proved to be;
    one whose own graph rounds them goes on doing so.
    """
    if head.quantization is None or head.quantization.format not in INTEGERS:
        return lower_head(model, head, name)
    where = f"head {name}"
    _lower(model, _find_product(model, where), _one_row, _FLOAT_ACTIVATIONS, guarded=False)
    return [Match(where, _PATTERN, f"{_OPERATOR}, exact activations")]


def _find_product(model: ir.Model, where: str) -> ir.Node:
    for node in model.graph:
        restore = node.inputs[1].producer() if node.op_type == "Gemm" and node.inputs[1] else None
        if (
            restore is not None
            and restore.op_type == "DequantizeLinear"
            and _scales_rows_or_blocks(restore)
            and attribute(node, "transB", 0) == 1
            and (attribute(node, "alpha", 1.0), attribute(node, "beta", 1.0)) == (1.0, 1.0)
        ):
            return node
    raise LoweringError(
        f"{where}: the manifest says integers, but the graph has no {_PATTERN}(transB=1)"
    )


def _scales_rows_or_blocks(restore: ir.Node) -> bool:
    has_blocks = attribute(restore, "block_size", 0) > 0
    return bool(attribute(restore, "axis", 1) == (1 if has_blocks else 0))


def _lower(
    model: ir.Model,
    product: ir.Node,
    tail: Callable[..., list[ir.Value]],
    accuracy_level: int,
    *,
    guarded: bool,
) -> None:
    graph = model.graph
    x, restored = product.inputs[0], product.inputs[1]
    assert x is not None and restored is not None
    restore = restored.producer()
    assert restore is not None
    weight = restore.inputs[0]
    assert weight is not None and weight.const_value is not None
    V, H = weight.const_value.shape.numpy()
    packed = pack_weight(restore)
    stem = (weight.name or "").rsplit(".", 1)[0]
    constants = {packed_name(weight.name or ""): packed.values, f"{stem}.scale": packed.scale}
    if packed.zero is not None:
        constants[f"{stem}.zero"] = packed.zero
    consumed = [value.name or "" for value in restore.inputs if value is not None]
    replacements = [
        ir.val(name, const_value=ir.tensor(array, name=name)) for name, array in constants.items()
    ]
    emit = Emitter(graph, product, "head")

    def multiply(rows: ir.Value) -> ir.Value:
        return emit.op(
            _OPERATOR,
            [rows, *replacements],
            "products",
            domain=CONTRIB,
            K=H,
            N=V,
            bits=packed.bits,
            block_size=packed.block,
            accuracy_level=accuracy_level,
        )

    terms = tail(emit, x, H, packed.block, multiply)
    if guarded:
        zeros = emit.op("Mul", [x, emit.scalar(0.0, np.float32)], "zeros")
        terms.append(emit.op("ReduceSum", [zeros, emit.ints(1)], "guard", keepdims=1))
    if len(product.inputs) > 2 and product.inputs[2] is not None:
        terms.append(product.inputs[2])
    replace(graph, product, [emit.op("Sum", terms, "product")])
    graph.remove(restore, safe=True)
    for each in consumed:
        del graph.initializers[each]
    for value in replacements:
        graph.register_initializer(value)
    model.opset_imports[CONTRIB] = 1


def _one_row(
    emit: Emitter, x: ir.Value, H: int, block: int, multiply: Callable[[ir.Value], ir.Value]
) -> list[ir.Value]:
    del emit, H, block
    return [multiply(x)]


def _residual(
    emit: Emitter, x: ir.Value, H: int, block: int, multiply: Callable[[ir.Value], ir.Value]
) -> list[ir.Value]:
    first = round_activations(emit, x, H, block).first
    rest = emit.op("Sub", [x, first], "rest")
    both = emit.op("Concat", [first, rest], "first_and_rest", axis=0)
    return list(emit.ops("Split", [multiply(both)], ("of_first", "of_rest"), axis=0, num_outputs=2))


_TAILS: dict[str, Callable[..., list[ir.Value]]] = {"residual": _residual, "rounded": _one_row}
