"""Rewriting a portable head so that its weight is stored in fewer bits.

    Gemm(x, W, b?, transB=1)  →  Gemm(x, Ŵ, b?, transB=1)
    int8: Ŵ = DequantizeLinear(W.int8 [V, H], W.scale [V, ceil(H / block)], axis=1, block_size)
    fp16: Ŵ = Cast<float>(W.fp16 [V, H])

Gemm is kept on purpose: ONNX Runtime fuses DequantizeLinear → MatMul into an operator that rounds
activations by default, and leaves DequantizeLinear → Gemm(transB=1) alone under every option.
The product is computed in float32; what precedes and follows it (bias, scale, softcap) stays.
"""

from __future__ import annotations

import onnx_ir as ir

from headport.errors import QuantizeError
from headport.quantize.formats import Format, StoredWeight

__all__ = ["find_product", "store_head_weight"]


def find_product(model: ir.Model, weight: str) -> ir.Node:
    """The Gemm(transB=1) that multiplies with the weight, directly or through a Cast.

    Raises:
        QuantizeError: If the graph uses the weight in any other way; the head is then not one
            that can be quantised, and leaving it as it is would pass unseen.
    """
    if weight not in model.graph.initializers:
        raise QuantizeError(f"the head's graph has no initialiser {weight!r}")
    value = model.graph.initializers[weight]
    if value.is_graph_output():
        raise QuantizeError(f"the head gives its weight {weight} out as it is")
    uses = list(value.uses())
    is_float = value.dtype == ir.DataType.FLOAT
    if len(uses) == 1 and uses[0].node.op_type == "Cast":
        cast = uses[0].node
        is_float = cast.attributes["to"].as_int() == ir.DataType.FLOAT
        uses = list(cast.outputs[0].uses())
    if len(uses) == 1 and uses[0].idx == 1 and is_float and _is_product(uses[0].node):
        return uses[0].node
    found = ", ".join(sorted(use.node.op_type for use in uses)) or "nothing"
    raise QuantizeError(
        f"one float32 Gemm(transB=1) was expected to read the head's weight {weight}, "
        f"found: {found}"
    )


def _is_product(node: ir.Node) -> bool:
    expected = {"transA": 0, "transB": 1, "alpha": 1.0, "beta": 1.0}
    defaults = {**expected, "transB": 0}
    found = {name: attribute.value for name, attribute in node.attributes.items()}
    return node.op_type == "Gemm" and {**defaults, **found} == expected


def store_head_weight(
    model: ir.Model, weight: str, stored: StoredWeight, kind: Format, block: int
) -> str:
    """Replace the head's weight by its stored form; returns the new weight's name.

    Args:
        model: The head's graph; changed in place.
        weight: Initialiser that holds W [V, H].
        stored: W as `kind` stores it.
        kind: Row of `FORMATS`.
        block: Weights that share a scale.

    Raises:
        QuantizeError: If the weight is not read by exactly one Gemm(transB=1).
    """
    product = find_product(model, weight)
    graph = model.graph
    values = {}
    for suffix, array in stored.tensors.items():
        name = f"{weight}.{suffix}"
        value = ir.val(name, const_value=ir.tensor(array, name=name))
        graph.register_initializer(value)
        values[suffix] = value
    before = product.inputs[1]
    assert before is not None
    restore = kind.restore(values, block)
    restored = restore.outputs[0]
    restored.name = f"{weight}.restored"
    restored.dtype = ir.DataType.FLOAT
    restored.shape = graph.initializers[weight].shape
    graph.insert_before(product, restore)
    product.replace_input_with(1, restored)
    if (cast := before.producer()) is not None:
        graph.remove(cast, safe=True)
    del graph.initializers[weight]
    return next(iter(values.values())).name or ""
