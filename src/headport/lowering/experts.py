"""Routed experts as ONNX Runtime's fused operator, where it can say the same.

    headport::MixtureOfExperts…(x, expert_ids, expert_weights, up, down[, up_bias, down_bias])
      →  com.microsoft::MoE(x, router, up', up_bias', down', down_bias) · Σ expert_weights

The operator chooses experts by itself, from a softmax over all of them. It is handed a row that is
log(weight) at the chosen experts and as good as −∞ elsewhere, so it chooses those, with the given
weights divided by their sum: any router with weights above zero can be expressed. On CPU its gated
form wants gate and up rows in turn, [output, input]; matrices of another order are rewritten once.
What the operator has no form for stays a portable function, and is reported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.lowering.emit import CONTRIB, Emitter, attribute, replace
from headport.lowering.match import Match

__all__ = ["EXPERTS", "lower_experts"]

# The function's names and signature are defined in headport/export/expert_function.py.
EXPERTS = "MixtureOfExperts"
_FLAGS = ("gated", "clamped", "interleaved", "transposed", "bias")
_OPERATOR = "MoE"
# Activation, gated or not → what the operator calls it. Its own `gelu` is the tanh form.
_ACTIVATIONS = {
    ("swiglu", True): "swiglu",
    ("swiglu", False): "silu",
    ("gelutanh", False): "gelu",
    ("relu", False): "relu",
}
_DTYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_INTERLEAVED = 1  # swiglu_fusion: gate and up rows in turn
_NOT_CHOSEN = -6e4  # exp of it is 0 beside any logarithm of a weight; float16 holds it
_SMALLEST = 1e-30  # a weight of zero is still chosen


def lower_experts(model: ir.Model) -> list[Match]:
    """Replace every call of routed experts that the operator can express."""
    matches = []
    calls = [n for n in model.graph if n.domain == "headport" and n.op_type.startswith(EXPERTS)]
    for index, call in enumerate(calls):
        where, was = f"experts of layer {index} with experts", call.op_type
        reason = _obstacle(call)
        if not reason:
            _lower(model, call, f"experts.{index}")
        matches.append(Match(where, was, None if reason else _OPERATOR, reason))
    if any(match.became for match in matches):
        model.opset_imports[CONTRIB] = 1
    return matches


def _features(call: ir.Node) -> tuple[str, frozenset[str]]:
    _, activation, *flags = call.op_type.split("_")
    return activation, frozenset(flags)


def _obstacle(call: ir.Node) -> str:
    activation, flags = _features(call)
    x, ids, _, *weights = call.inputs
    if x is None or x.dtype not in _DTYPES:
        return f"{_OPERATOR} computes in float or float16 on CPU, {x and x.dtype} found"
    if (activation, "gated" in flags) not in _ACTIVATIONS or flags - set(_FLAGS):
        return f"{_OPERATOR} has no such activation"
    if "clamped" in flags and activation != "swiglu":
        return f"{_OPERATOR} clamps nothing but swiglu"
    if activation == "swiglu" and "gated" not in flags and attribute(call, "alpha", 1.0) != 1:
        return f"{_OPERATOR}: its silu has no alpha"
    if any(w is None or not w.is_initializer() or w.const_value is None for w in weights):
        return "its matrices are computed in the graph"
    if ids is None or ids.shape is None or not isinstance(ids.shape[1], int):
        return "the number of chosen experts is not a constant"
    return ""


def _lower(model: ir.Model, call: ir.Node, prefix: str) -> None:
    activation, flags = _features(call)
    x, ids, weights, up, down, *biases = call.inputs
    assert x is not None and ids is not None and weights is not None
    assert up is not None and down is not None and ids.shape is not None
    emit = Emitter(model.graph, call, prefix)
    gated, turned = "gated" in flags, "transposed" in flags
    apart = gated and "interleaved" not in flags
    matrices = [
        _arranged(model, up, turned=turned, apart=apart),
        None,
        _arranged(model, down, turned=turned, apart=False),
        None,
    ]
    if biases:
        up_bias, down_bias = biases
        assert up_bias is not None
        matrices[1] = _arranged(model, up_bias, turned=False, apart=apart)
        matrices[3] = down_bias
    attributes: dict[str, Any] = {
        "k": ids.shape[1],
        "activation_type": _ACTIVATIONS[activation, gated],
        "normalize_routing_weights": 0,
    }
    if gated:
        attributes["swiglu_fusion"] = _INTERLEAVED
        attributes["activation_alpha"] = float(attribute(call, "alpha", 1.0))
        attributes["activation_beta"] = float(attribute(call, "beta", 0.0))
    if "clamped" in flags:
        attributes["swiglu_limit"] = float(attribute(call, "limit", 0.0))
    router = _router(emit, x, ids, weights, down)
    y = emit.op(_OPERATOR, [x, router, *matrices], "mixture", domain=CONTRIB, **attributes)
    total = emit.op("ReduceSum", [weights, emit.ints(1)], "weights_sum", keepdims=1)
    y = emit.op("Mul", [y, emit.op("CastLike", [total, x], "weights_sum_typed")], "y")
    replace(model.graph, call, [y])


def _router(
    emit: Emitter, x: ir.Value, ids: ir.Value, weights: ir.Value, down: ir.Value
) -> ir.Value:
    # [N, E]: log(weight) where an expert is chosen.
    assert down.shape is not None
    rows = emit.op("Shape", [x], "rows", start=0, end=1)
    experts = emit.ints(int(down.shape[0]))  # type: ignore[arg-type]
    shape = emit.op("Concat", [rows, experts], "router_shape", axis=0)
    nothing = emit.op("Expand", [emit.scalar(_NOT_CHOSEN, np.float32), shape], "not_chosen")
    typed = emit.op("Cast", [weights], "weights_float", to=ir.DataType.FLOAT)
    bounded = emit.op("Max", [typed, emit.scalar(_SMALLEST, np.float32)], "weights_bounded")
    logarithm = emit.op("Log", [bounded], "weights_log")
    router = emit.op("ScatterElements", [nothing, ids, logarithm], "router_float", axis=1)
    return emit.op("CastLike", [router, x], "router")


def _arranged(model: ir.Model, value: ir.Value, *, turned: bool, apart: bool) -> ir.Value:
    """An initialiser in the operator's order, computed when it is written.

    Args:
        model: Holds it.
        value: [E, input, output] if turned, else [E, output, input], or a bias [E, output].
        turned: Input and output change places.
        apart: Gates lie before ups, and are put in turn.
    """
    if not (turned or apart):
        return value
    tensor = value.const_value
    assert tensor is not None
    name = f"{value.name}.in_turn"
    if name in model.graph.initializers:
        return model.graph.initializers[name]
    E, *rest = tensor.shape.numpy()
    shape = (E, *reversed(rest)) if turned else (E, *rest)

    def evaluate() -> ir.TensorProtocol:
        array: npt.NDArray[Any] = tensor.numpy()
        if turned:
            array = array.swapaxes(1, 2)
        if apart:  # gates, ups → gate, up, gate, up …
            array = array.reshape(E, 2, shape[1] // 2, *shape[2:]).swapaxes(1, 2).reshape(shape)
        return ir.Tensor(np.ascontiguousarray(array), tensor.dtype, name=name)

    lazy = ir.LazyTensor(evaluate, tensor.dtype, ir.Shape(shape), name=name, cache=False)
    arranged = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape), const_value=lazy
    )
    model.graph.register_initializer(arranged)
    return arranged
