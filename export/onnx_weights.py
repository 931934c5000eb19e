"""The model's weights in the graph: named as the checkpoint names them, values left in its files.

A deferred weight is traced as a fake tensor, which has a shape and no value, so that nothing can be
computed from a value that is not there. Afterwards its initialiser is bound to the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from headport.errors import ExportError
from headport.export.deferred import DeferredTensor, blocks, put_back, replace_deferred
from headport.graphs import BlockTensor

__all__ = ["bind_weights", "fake_weights", "finite", "unused_parameters", "weight_tensor"]

_USED = "headport parameters"  # key in a model's working notes, which are not written


@contextmanager
def fake_weights(model: torch.nn.Module) -> Iterator[None]:
    """Put fake tensors in the place of deferred weights while the context lasts."""
    mode = FakeTensorMode()

    def fake(parameter: DeferredTensor) -> torch.Tensor:
        with mode:
            return torch.empty(parameter.shape, dtype=parameter.dtype)

    found = replace_deferred(model, fake)
    try:
        yield
    finally:
        put_back(found)


def weight_tensor(tensor: torch.Tensor, name: str) -> ir.TensorProtocol:
    """A weight as the graph holds it; a deferred one is read when it is written."""
    if not isinstance(tensor, DeferredTensor):
        return tensor_adapters.TorchTensor(tensor.detach(), name=name)
    kind = tensor_adapters.from_torch_dtype(tensor.dtype)

    def pieces() -> Iterator[npt.NDArray[Any]]:
        for block in blocks(tensor):
            yield finite(tensor_adapters.TorchTensor(block).numpy(), kind, name)

    return BlockTensor(pieces, kind, tuple(tensor.shape), name)


def finite(array: npt.NDArray[Any], kind: ir.DataType, name: str) -> npt.NDArray[Any]:
    """The array itself.

    Raises:
        ExportError: If a floating-point value is NaN or infinite. A value beyond float16's range
            shows up here in a half-precision graph, as an infinity.
    """
    if kind.is_floating_point() and not np.isfinite(array.astype(np.float32, copy=False)).all():
        raise ExportError(f"{name} holds a value that {kind.name} cannot hold")
    return array


def bind_weights(backbone: ir.Model, model: torch.nn.Module, prefix: str) -> None:
    """Give initialisers that are the model's weights the checkpoint's names, and their values.

    Args:
        backbone: As exported, without anything unused.
        model: Its parameters.
        prefix: What the exporter put before each name.

    Raises:
        ExportError: If an initialiser stands for a weight that nothing supplies.
    """
    graph = backbone.graph
    used = backbone.meta[_USED] = set()
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # A tied weight has one name, whichever module it was traced through.
    first = {id(p): name for name, p in reversed(parameters.items())}
    for value in list(graph.initializers.values()):
        assert value.name is not None and value.const_value is not None
        parameter = parameters.get(value.name.removeprefix(prefix))
        if parameter is not None and value.name.startswith(prefix):
            name = first[id(parameter)]
            tensor = weight_tensor(parameter, name)
            if (tensor.dtype, tuple(tensor.shape)) != (value.dtype, tuple(value.shape or ())):
                raise ExportError(
                    f"{name} is {value.dtype} {value.shape} in the graph, but {tensor.dtype} "
                    f"{tensor.shape} in the model"
                )
            value.const_value = tensor
            used.add(name)
            _rename(graph, value, name)
        elif value.name.removeprefix(prefix) in buffers:
            _rename(graph, value, value.name.removeprefix(prefix))
        elif isinstance(value.const_value.raw, FakeTensor):
            raise ExportError(
                f"the graph holds a weight {value.name} that is no parameter of the model, so "
                "nothing supplies its value"
            )


def _rename(graph: ir.Graph, value: ir.Value, name: str) -> None:
    if name == value.name or name in graph.initializers:
        return
    assert value.name is not None and value.const_value is not None
    del graph.initializers[value.name]
    value.name = value.const_value.name = name
    graph.initializers[name] = value


def unused_parameters(model: Any, *traced: ir.Model) -> tuple[str, ...]:
    """Parameters of a model that neither a traced graph nor the head's module uses."""
    head = {id(p) for p in model.get_output_embeddings().parameters()}
    used: set[str] = set().union(*(graph.meta[_USED] for graph in traced))
    named = model.named_parameters()
    return tuple(sorted(name for name, p in named if name not in used and id(p) not in head))
