"""Rewriting a portable backbone so that its matrices are stored in fewer bits.

    MatMul(x, W [K, N])  →  Reshape → Gemm(x, Ŵ, transB=1) → Reshape
    Gemm(x, W, b?)       →  Gemm(x, Ŵ, transB=1), Add b
    int8, int4: Ŵ = DequantizeLinear(W.int8 [N, K], W.scale [N, ceil(K / block)], axis=1)
    fp16:       Ŵ = Cast<float>(W.fp16 [N, K])

Gemm and not MatMul, as for the head: ONNX Runtime fuses DequantizeLinear → MatMul into an operator
that rounds activations by default. Gemm takes two dimensions, hence the Reshapes, which move
nothing. Products are computed in float32, also in a half-precision backbone.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from headport.lowering.emit import Emitter, replace
from headport.lowering.matrices import FLAT, Matrix
from headport.quantize.formats import Format, StoredWeight

__all__ = ["register_stored", "store_matrix"]

_FLOAT = ir.DataType.FLOAT


def store_matrix(
    model: ir.Model, matrix: Matrix, stored: StoredWeight, kind: Format, block: int
) -> None:
    """Put a stored matrix in the place of a weight, in all products that read it.

    Args:
        model: The backbone; changed in place.
        matrix: The weight and its products.
        stored: W [N, K] as `kind` stores it.
        kind: Row of `FORMATS`.
        block: Weights that share a scale.
    """
    graph = model.graph
    restore = kind.restore(register_stored(model, matrix.name, stored), block)
    restored = restore.outputs[0]
    restored.name, restored.dtype = f"{matrix.name}.restored", _FLOAT
    restored.shape = ir.Shape(matrix.shape)
    graph.insert_before(matrix.products[0], restore)
    for number, product in enumerate(matrix.products):
        prefix = matrix.name if number == 0 else f"{matrix.name}.{number}"
        _replace_product(model, product, restored, prefix, matrix.value.dtype or _FLOAT)
    for use in list(matrix.value.uses()):  # the Transposes through which it was read
        graph.remove(use.node, safe=True)
    assert matrix.value.name is not None
    del graph.initializers[matrix.value.name]


def register_stored(model: ir.Model, name: str, stored: StoredWeight) -> dict[str, ir.Value]:
    """The tensors of a stored weight as initialisers `<name>.<suffix>`, by suffix."""
    values = {}
    for suffix, array in stored.tensors.items():
        full = f"{name}.{suffix}"
        values[suffix] = ir.val(full, const_value=ir.tensor(array, name=full))
        model.graph.register_initializer(values[suffix])
    return values


def _replace_product(
    model: ir.Model, product: ir.Node, weight: ir.Value, prefix: str, kind: ir.DataType
) -> None:
    graph = model.graph
    x, y = product.inputs[0], product.outputs[0]
    assert x is not None and weight.shape is not None
    N, K = (int(d) for d in weight.shape.numpy())
    emit = Emitter(graph, product, prefix)
    if kind != _FLOAT:
        x = emit.op("Cast", [x], "x_float", to=_FLOAT)
        x.type, x.shape = ir.TensorType(_FLOAT), product.inputs[0].shape  # type: ignore[union-attr]
    is_flat = x.shape is not None and len(x.shape) == 2
    rows = x if is_flat else _reshaped(emit, x, emit.ints(-1, K), f"{prefix}.x_rows", (None, K))
    made = _typed(emit.op("Gemm", [rows, weight], "product", transB=1), (None, N))
    if not is_flat:
        leading = emit.op("Shape", [x], "leading", start=0, end=-1)
        shape = emit.op("Concat", [leading, emit.ints(N)], "y_shape", axis=0)
        made = _reshaped(emit, made, shape, f"{prefix}.y", y.shape)
    bias = product.inputs[2] if len(product.inputs) > 2 else None
    if bias is not None:
        if kind != _FLOAT:
            bias = emit.op("Cast", [bias], "bias_float", to=_FLOAT)
        made = _typed(emit.op("Add", [made, bias], "with_bias"), y.shape)
    if kind != _FLOAT:
        made = emit.op("Cast", [made], "y_typed", to=kind)
    replace(graph, product, [made])


def _reshaped(emit: Emitter, x: ir.Value, shape: ir.Value, name: str, dims: Any) -> ir.Value:
    # Named so that `headport.lowering.matrices` knows it again.
    made = _typed(emit.op("Reshape", [x, shape], name.rsplit(".", 1)[1]), dims)
    node = made.producer()
    assert node is not None
    node.name = f"{FLAT}{name}"
    return made


def _typed(value: ir.Value, dims: Any) -> ir.Value:
    value.type, value.shape = ir.TensorType(_FLOAT), None if dims is None else ir.Shape(dims)
    return value
