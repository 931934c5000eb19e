"""What products of headport's own kernel do before and after them, against float64.

On a prompt's own activations, from what each node of the written file is given and gives: the sum
and its norm, and the gate. That the right norm was taken is for the hidden states to show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.bundle import Bundle
from headport.errors import ParityError
from headport.kernels import DOMAIN, GAMMA, NORMED, PRODUCT, SKIP, SUM, UNGATED
from headport.lowering.product_runs import open_up, run_prompt
from headport.session import SessionSettings

__all__ = ["FusionCheck", "check_fusions"]

Float64 = npt.NDArray[np.float64]

_ACCEPTED = 1e-5  # of a value, or of the factors of a gate; float32 gives some 1e-6
_UNDERFLOW = 1e-30


def _silu(g: Float64) -> Float64:
    y: Float64 = g / (1 + np.exp(-g))
    return y


def _gelu_tanh(g: Float64) -> Float64:
    y: Float64 = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    return y


_GATES = {"silu": _silu, "gelu_tanh": _gelu_tanh}


@dataclass(frozen=True)
class FusionCheck:
    """How far norms and gates inside of products are from the float64 reference."""

    norms: int
    gates: int
    error: float  # relative, the largest
    accepted: float = _ACCEPTED


def check_fusions(bundle: Bundle, settings: SessionSettings | None = None) -> FusionCheck:
    """Compare every fused norm and gate of a written backbone.

    Raises:
        ParityError: If one differs by more than float32 does, naming its weight.
    """
    model = ir.load(bundle.path / bundle.manifest.backbone.file)
    nodes = [n for n in model.graph if (n.domain, n.op_type) == (DOMAIN, PRODUCT)]
    fused = [node for node in nodes if open_up(node) is not None]
    if not fused:
        return FusionCheck(0, 0, 0.0)
    constants = {v.name: v.const_value for v in model.graph.initializers.values()}
    watched = [v for node in fused for v in _ends(node)]
    values = run_prompt(bundle, model, watched, settings)
    norms, gates, largest = 0, 0, 0.0
    for node in fused:
        given = {v.name: values[v.name] for v in _ends(node) if v.name}
        if _at(node.inputs, GAMMA) is not None:
            gamma = constants[node.inputs[GAMMA].name].numpy()  # type: ignore
            largest = max(largest, _accept(node, _norm_error(node, given, gamma)))
            norms += 1
        if node.attributes["activation"].as_string() != "none":
            largest = max(largest, _accept(node, _gate_error(node, given)))
            gates += 1
    return FusionCheck(norms, gates, largest)


def _at(values: Any, place: int) -> Any:
    found = values[place] if place < len(values) else None
    return found if found is not None and found.name else None


def _ends(node: ir.Node) -> list[ir.Value]:
    inputs = [_at(node.inputs, place) for place in (0, SKIP)]
    outputs = [_at(node.outputs, place) for place in (0, SUM, NORMED, UNGATED)]
    return [value for value in (*inputs, *outputs) if value is not None]


def _norm_error(node: ir.Node, values: Mapping[str, Float64], gamma: npt.NDArray[Any]) -> float:
    total = values[node.inputs[0].name]  # type: ignore
    if (skip := _at(node.inputs, SKIP)) is not None:
        total = total + values[skip.name]
    square = np.square(total).mean(axis=-1, keepdims=True)
    epsilon = node.attributes["epsilon"].as_float()
    expected = total / np.sqrt(square + epsilon) * gamma.astype(np.float64)
    errors = [_relative(values[node.outputs[NORMED].name or ""] - expected, expected)]
    if (kept := _at(node.outputs, SUM)) is not None:
        errors.append(_relative(values[kept.name] - total, total))
    return float(np.max(errors))  # NaN, where one is


def _gate_error(node: ir.Node, values: Mapping[str, Float64]) -> float:
    gate, up = np.split(values[node.outputs[UNGATED].name or ""], 2, axis=-1)
    with np.errstate(over="ignore"):  # exp(-g) of a g far below 0, where the gate is closed
        activated = _GATES[node.attributes["activation"].as_string()](gate)
    return _relative(values[node.outputs[0].name or ""] - activated * up, gate * up)


def _relative(difference: Float64, size: Float64) -> float:
    return float((np.abs(difference) / (np.abs(size) + _UNDERFLOW)).max())


def _accept(node: ir.Node, error: float) -> float:
    if not error <= _ACCEPTED:
        weight = node.inputs[1].name if node.inputs[1] is not None else node.name
        raise ParityError(
            f"the written backbone's norm or gate at {weight} differs by {error:.3g} of its size "
            f"from float64, {_ACCEPTED:g} is accepted; nothing was written"
        )
    return error
