"""Weights in a graph: the checkpoint's names, values bound to files, nothing without a value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_ir import tensor_adapters
from safetensors.torch import save_file

from headport.errors import ExportError
from headport.export.deferred import DeferredTensor, recording
from headport.export.names import name_nodes, note_provenance
from headport.export.onnx_weights import bind_weights, fake_weights, weight_tensor
from headport.export.shards import read_header
from headport.graphs import BlockTensor

TEXT = """<ir_version: 10, opset_import: ["" : 23]>
g (float[n, 3] x) => (float[n, 2] y) { t = MatMul (x, w)  y = Add (t, b) }"""


class Tied(torch.nn.Module):
    def __init__(self, file: Path) -> None:
        super().__init__()
        parts = read_header(file)
        self.first = torch.nn.Linear(2, 3, bias=False)
        self.second = torch.nn.Linear(2, 3, bias=False)
        weight = torch.nn.Parameter(DeferredTensor.stored(parts["w"]))
        self.first.weight = self.second.weight = weight
        self.register_buffer("steps", torch.ones(2))


@pytest.fixture
def model(tmp_path: Path) -> Tied:
    save_file({"w": torch.arange(6.0).reshape(3, 2)}, tmp_path / "m.safetensors")
    return Tied(tmp_path / "m.safetensors")


def graph_of(model: Tied, weight: str = "model.second.weight") -> ir.Model:
    # As the exporter leaves it: traced through the second name, values fake.
    graph = ir.from_onnx_text(TEXT)
    with fake_weights(model):
        tensors = {weight: model.second.weight, "model.steps": model.steps}
    for name, tensor in zip("wb", tensors.items(), strict=True):
        value = ir.Value(
            name=tensor[0],
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(tuple(tensor[1].shape)),
            const_value=tensor_adapters.TorchTensor(tensor[1].detach(), name=tensor[0]),
        )
        for node in graph.graph:
            for i, used in enumerate(node.inputs):
                if used is not None and used.name == name:
                    node.replace_input_with(i, value)
        graph.graph.register_initializer(value)
    return graph


def test_initialisers_get_names_and_values(model: Tied) -> None:
    graph = graph_of(model)
    bind_weights(graph, model, "model.")
    assert sorted(graph.graph.initializers) == ["first.weight", "steps"]
    bound = graph.graph.initializers["first.weight"].const_value
    assert isinstance(bound, BlockTensor)
    np.testing.assert_array_equal(bound.numpy(), np.arange(6, dtype=np.float32).reshape(3, 2))
    assert bound.tobytes() == np.arange(6, dtype=np.float32).tobytes()
    assert isinstance(model.first.weight, DeferredTensor)
    assert model.first.weight is model.second.weight


def test_a_fake_that_nothing_supplies_is_an_error(model: Tied) -> None:
    with pytest.raises(ExportError, match=r"holds a weight model\.lost that is no parameter"):
        bind_weights(graph_of(model, "model.lost"), model, "model.")


def test_a_weight_of_another_shape_is_an_error(model: Tied) -> None:
    graph = graph_of(model)
    graph.graph.initializers["model.second.weight"].shape = ir.Shape((2, 3))
    with pytest.raises(ExportError, match=r"first\.weight is .* in the graph"):
        bind_weights(graph, model, "model.")


@pytest.mark.parametrize("value", [70000.0, float("nan")])
def test_a_value_float16_cannot_hold_is_found_when_it_is_written(
    value: float, tmp_path: Path
) -> None:
    save_file({"w": torch.tensor([[1.0, value]])}, tmp_path / "m.safetensors")
    with recording():
        weight = DeferredTensor.stored(read_header(tmp_path / "m.safetensors")["w"])
        half = weight.to(torch.float16)
    with pytest.raises(ExportError, match="w holds a value that FLOAT16 cannot hold"):
        weight_tensor(half, "w").numpy()


def test_nodes_are_named_after_their_modules() -> None:
    graph = ir.from_onnx_text(TEXT.replace("w)", "x)").replace("b)", "t)"))
    first, second = graph.graph
    key = "pkg.torch.onnx.name_scopes"
    first.metadata_props[key] = "['', 'model', 'model.layers.0', 'model.layers.0.mlp', 'linear']"
    second.metadata_props[key] = first.metadata_props[key]
    second.op_type = "MatMul"
    name_nodes(graph, "model.")
    assert [node.name for node in graph.graph] == ["layers.0.mlp/MatMul", "layers.0.mlp/MatMul_1"]
    first.metadata_props[key] = "['', '_symbolic']"
    name_nodes(graph, "model.")
    assert first.name == "MatMul"


def test_provenance_stands_in_the_graph() -> None:
    graph = ir.from_onnx_text(TEXT.replace("w)", "x)").replace("b)", "t)"))
    note_provenance(graph, "llama", "ab", "fp16")
    kept = {entry.key: entry.value for entry in ir.to_proto(graph).metadata_props}
    assert (kept["headport.checkpoint"], kept["headport.dtype"]) == ("llama", "fp16")
