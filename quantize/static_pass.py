"""Rounding a head's hidden states in its graph, by one scale.

    Gemm(x, Ŵ, b?)  →  Gemm(DequantizeLinear(QuantizeLinear(x, S_x)), Ŵ, b?)

Where a kernel knows the pattern, INT8 is multiplied with INT8.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from headport.errors import QuantizeError
from headport.static_rounding import SCALE, ZERO

__all__ = ["round_hidden_states"]

_LARGEST = 127


def round_hidden_states(model: ir.Model, product: ir.Node, largest: float) -> None:
    """Round what a product multiplies its weight with.

    Args:
        model: The head's graph; changed in place.
        product: Its Gemm.
        largest: Largest magnitude of hidden states on the calibration texts.

    Raises:
        QuantizeError: If it is 0: there would be no scale.
    """
    if not largest > 0:
        raise QuantizeError(
            "--activations static: the calibration texts give hidden states of 0 only; give others"
        )
    graph, x = model.graph, product.inputs[0]
    assert x is not None
    step = np.array(np.float32(largest) / np.float32(_LARGEST), np.float32)
    constants = [
        ir.val(name, const_value=ir.tensor(array, name=name))
        for name, array in ((SCALE, step), (ZERO, np.array(0, np.int8)))
    ]
    for value in constants:
        graph.register_initializer(value)
    narrow = ir.node("QuantizeLinear", [x, *constants], name="node_hidden_int8")
    wide = ir.node("DequantizeLinear", [narrow.outputs[0], *constants], name="node_hidden_rounded")
    for node, name, dtype in (
        (narrow, "hidden_int8", ir.DataType.INT8),
        (wide, "hidden_rounded", ir.DataType.FLOAT),
    ):
        output = node.outputs[0]
        output.name, output.dtype, output.shape = name, dtype, x.shape
    graph.insert_before(product, [narrow, wide])
    product.replace_input_with(0, wide.outputs[0])
