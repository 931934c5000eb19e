"""A head on its way into a bundle: its graphs, its entry, and what PyTorch says it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import nn

from headport.errors import ExportError
from headport.export.head import HeadTransform
from headport.export.head_graph import GraphBuilder, build_head, finish_rows
from headport.manifest import Head, TaskHead

__all__ = [
    "ExportedHead",
    "Layer",
    "Part",
    "check_weights",
    "entries",
    "layers_graph",
    "make_part",
]

_SMALL = (
    1 << 16
)  # weights; so few stay float32 in a half-precision bundle, there is nothing to gain
Reference = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class ExportedHead:
    """One head, ready to be written."""

    name: str
    entry: Head | TaskHead
    graphs: Mapping[str, ir.Model]  # by name
    reference: Reference  # hidden states [N, H] → answers, as `headport.head_answers` names them
    files: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)  # arrays beside the graphs


def entries(heads: Iterable[ExportedHead]) -> tuple[dict[str, Head], dict[str, TaskHead]]:
    """The manifest's entries of heads, by name: those of a vocabulary, and the others."""
    vocabulary: dict[str, Head] = {}
    others: dict[str, TaskHead] = {}
    for head in heads:
        if isinstance(head.entry, Head):
            vocabulary[head.name] = head.entry
        else:
            others[head.name] = head.entry
    return vocabulary, others


@dataclass(frozen=True)
class Part:
    """One product with a matrix: entry and graph."""

    entry: Head
    graph: ir.Model


@dataclass(frozen=True)
class Layer:
    """x ← activation(W x + b), added to x where it is residual."""

    linear: nn.Linear
    activation: str  # key of `_ACTIVATIONS`
    residual: bool = False


def make_part(
    linear: nn.Linear, name: str, dtype: torch.dtype, transform: str | None = None
) -> Part:
    """The entry and the graph of one matrix, hidden_states [rows, H] → logits [rows, n].

    Args:
        linear: Holds W [n, H] and maybe a bias.
        name: Of the part, as `headport.head_parts` makes it.
        dtype: Precision of the bundle; a small matrix stays float32.
        transform: Graph that comes before it.

    Raises:
        ExportError: If a weight is NaN, infinite, or too large for `dtype`.
    """
    check_weights(linear, name)
    weight = linear.weight.detach()
    if weight.numel() > _SMALL:
        weight = weight.to(dtype)
        if not torch.isfinite(weight).all():
            raise ExportError(f"head {name}: its weight holds values that {dtype} cannot hold")
    bias = None if linear.bias is None else linear.bias.detach()
    made = HeadTransform(weight, f"{name}.weight", bias, 1.0, None, tied=False)
    entry = Head(
        graph=f"head.{name}",
        outputs="logits",
        vocab_size=len(weight),
        scale=1.0,
        softcap=None,
        bias=bias is not None,
        weight=f"{name}.weight",
        tied=False,
        quantization=None,
        transform=transform,
    )
    return Part(entry, build_head(made, entry.graph))


def check_weights(module: nn.Module, name: str) -> None:
    """Raise `ExportError` if a weight of a head is NaN or infinite."""
    broken = [n for n, p in module.named_parameters() if not torch.isfinite(p).all()]
    if broken:
        raise ExportError(f"head {name}: its {', '.join(broken)} holds NaN or infinity")


_Activation = Callable[[GraphBuilder, ir.Value, str], ir.Value]


def _one(operator: str) -> _Activation:
    return lambda build, x, name: build.op(operator, [x], name)


def _silu(build: GraphBuilder, x: ir.Value, name: str) -> ir.Value:
    return build.op("Mul", [x, build.op("Sigmoid", [x], f"{name}_gate")], name)


# Names are those of headport.export.heads.modules.ACTIVATIONS.
_ACTIVATIONS: dict[str, _Activation] = {
    "relu": _one("Relu"),
    "gelu": _one("Gelu"),
    "silu": _silu,
    "tanh": _one("Tanh"),
    "none": lambda _build, x, _name: x,
}


def layers_graph(layers: list[Layer], name: str) -> ir.Model:
    """The graph of some layers, hidden_states [rows, H] → states [rows, F], float32.

    Args:
        layers: At least one.
        name: Of the graph, `head.` before it; weights are named after it.

    Raises:
        ExportError: If a weight is NaN or infinite.
    """
    build = GraphBuilder()
    stem = name.removeprefix("head.")
    hidden = ir.Value(
        name="hidden_states",
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape(["rows", layers[0].linear.in_features]),
    )
    x = hidden
    for n, layer in enumerate(layers):
        check_weights(layer.linear, stem)
        own = stem if len(layers) == 1 else f"{stem}.{n}"
        inputs = [x, build.constant(_float(layer.linear.weight, f"{own}.weight"))]
        if layer.linear.bias is not None:
            inputs.append(build.constant(_float(layer.linear.bias, f"{own}.bias")))
        y = build.op("Gemm", inputs, f"product_{n}", transB=1)
        y = _ACTIVATIONS[layer.activation](build, y, f"activated_{n}")
        x = build.op("Add", [x, y], f"joined_{n}") if layer.residual else y
    x.name = "states"
    return finish_rows(build, hidden, x, layers[-1].linear.out_features, name)


def _float(tensor: torch.Tensor, name: str) -> ir.TensorProtocol:
    array: npt.NDArray[np.float32] = tensor.detach().float().numpy()
    return ir.Tensor(np.ascontiguousarray(array), name=name)
