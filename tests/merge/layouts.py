"""A damaged layout: the head as other tools write it, which ONNX Runtime fuses by default."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

__all__ = ["use_fusible_layout"]


def use_fusible_layout(file: Path) -> None:
    """Rewrite Gemm(x, DequantizeLinear(Q, S), transB=1) as MatMul(x, DequantizeLinear(Qᵀ, Sᵀ)).

    The product is the same, but ONNX Runtime turns this layout into a kernel that rounds x.
    """
    model = ir.load(file)
    for value in model.graph.initializers.values():  # the data file is written anew
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.tensor(tensor.numpy().copy(), name=value.name)
    graph = model.graph
    (gemm,) = (node for node in graph if node.op_type == "Gemm")
    (restore,) = (node for node in graph if node.op_type == "DequantizeLinear")
    restored, turned = list(restore.inputs), []
    for value in restored:
        assert value is not None and value.const_value is not None
        name = f"{value.name}.turned"
        array = np.ascontiguousarray(value.const_value.numpy().T)
        turned.append(ir.val(name, const_value=ir.tensor(array, name=name)))
        graph.register_initializer(turned[-1])
    block = restore.attributes["block_size"].as_int()
    again = ir.node("DequantizeLinear", turned, {"axis": 0, "block_size": block})
    again.outputs[0].name = "restored.turned"
    product = ir.node("MatMul", [gemm.inputs[0], again.outputs[0]])
    product.outputs[0].name = "product.turned"
    graph.insert_before(gemm, [again, product])
    ir.convenience.replace_all_uses_with(gemm.outputs[0], product.outputs[0])
    graph.remove([gemm, restore], safe=True)
    for value in (v for v in restored if v is not None):
        del graph.initializers[value.name or ""]
    ir.save(model, file, external_data=f"{file.name}.data")
