"""The head as a graph: hidden_states [rows, H] → logits [rows, V] float32.

    Gemm(hidden_states, W, b?, transB=1) → Mul(scale)? → Div(c), Tanh, Mul(c)?

W keeps its [V, H] layout, so that a tied weight is the same bytes as the embedding. A half
precision weight is cast to float32 first: logits rounded to half precision would no longer rank.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from headport.export.functions import OPSET
from headport.export.head import HeadTransform
from headport.export.onnx_weights import weight_tensor

__all__ = ["GraphBuilder", "build_head", "finish_rows"]


class GraphBuilder:
    """Appends nodes to one list, naming each value after what it is."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []

    def op(self, op_type: str, inputs: list[ir.Value], name: str, **attributes: int) -> ir.Value:
        node = ir.node(op_type, inputs, attributes or None, name=f"node_{name}")
        node.outputs[0].name = name
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(
            name=tensor.name,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(tensor.shape.numpy()),
            const_value=tensor,
        )
        self.initializers.append(value)
        return value

    def scalar(self, number: float, name: str) -> ir.Value:
        return self.constant(ir.Tensor(np.array(number, np.float32), name=name))


def build_head(head: HeadTransform, name: str) -> ir.Model:
    """Build the graph of a head.

    Args:
        head: The fitted transform. Its weight has the backbone's dtype, which is also the dtype of
            `hidden_states`.
        name: Graph name, such as `head.lm`.
    """
    build = GraphBuilder()
    hidden_size = head.weight.shape[1]
    kind = tensor_adapters.from_torch_dtype(head.weight.dtype)
    hidden = ir.Value(
        name="hidden_states", type=ir.TensorType(kind), shape=ir.Shape(["rows", hidden_size])
    )
    weight = build.constant(weight_tensor(head.weight, head.weight_name))
    left, right = hidden, weight
    if kind != ir.DataType.FLOAT:
        left = build.op("Cast", [hidden], "hidden_float", to=ir.DataType.FLOAT)
        right = build.op("Cast", [weight], "weight_float", to=ir.DataType.FLOAT)
    inputs = [left, right]
    if head.bias is not None:
        name_of_bias = f"{head.weight_name.removesuffix('.weight')}.bias"
        bias = head.bias.to(torch.float32)
        inputs.append(build.constant(tensor_adapters.TorchTensor(bias, name=name_of_bias)))
    x = build.op("Gemm", inputs, "product", transB=1)
    if head.scale != 1.0:
        x = build.op("Mul", [x, build.scalar(head.scale, "scale")], "scaled")
    if head.softcap is not None:
        cap = build.scalar(head.softcap, "softcap")
        ratio = build.op("Div", [x, cap], "ratio")
        x = build.op("Mul", [build.op("Tanh", [ratio], "squashed"), cap], "capped")
    x.name = "logits"
    return finish_rows(build, hidden, x, head.weight.shape[0], name)


def finish_rows(
    build: GraphBuilder, hidden: ir.Value, output: ir.Value, width: int, name: str
) -> ir.Model:
    """The model of a graph hidden_states [rows, H] → one float32 output [rows, width]."""
    output.type = ir.TensorType(ir.DataType.FLOAT)
    output.shape = ir.Shape(["rows", width])
    graph = ir.Graph(
        [hidden],
        [output],
        nodes=build.nodes,
        initializers=build.initializers,
        opset_imports={"": OPSET},
        name=name,
    )
    return ir.Model(graph, ir_version=10, producer_name="headport")
