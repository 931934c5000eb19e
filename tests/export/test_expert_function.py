"""Bodies of `MixtureOfExperts…` against experts written in NumPy, one chosen pair at a time."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from headport.errors import ExportError
from headport.export.expert_function import ACTIVATIONS, ExpertLayout
from headport.export.functions import DOMAIN, OPSET, define_functions, function_for

Array = npt.NDArray[Any]
N, H, F, E, K = 7, 8, 6, 5, 2
ALPHA, BETA, LIMIT = 1.7, 1.0, 2.0
_TYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "int64": ir.DataType.INT64}

LAYOUTS = [
    ExpertLayout(activation, gated, clamped, interleaved, transposed, bias=transposed)
    for activation, gated, clamped, interleaved, transposed in itertools.product(
        ACTIVATIONS, *[(False, True)] * 4
    )
    if gated or not (clamped or interleaved)
]


def activated(name: str, x: Array) -> Array:
    erf = np.vectorize(math.erf)
    tanh = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return {
        "swiglu": x / (1 + np.exp(-ALPHA * x)),
        "relu": np.maximum(x, 0),
        "relu2": np.maximum(x, 0) ** 2,
        "gelu": x * 0.5 * (1 + erf(x / math.sqrt(2))),
        "gelutanh": 0.5 * x * (1 + tanh),
    }[name]


def one_expert(layout: ExpertLayout, h: Array) -> Array:
    """[2 F or F] → [F]."""
    if not layout.gated:
        return activated(layout.activation, h)
    gate, up = (h[::2], h[1::2]) if layout.interleaved else (h[:F], h[F:])
    if layout.clamped:
        gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
    return activated(layout.activation, gate) * (up + BETA * (layout.activation == "swiglu"))


def inputs_of(layout: ExpertLayout, dtype: str = "float32") -> dict[str, Array]:
    rng = np.random.default_rng(0)
    wide = 2 * F if layout.gated else F
    up, down = rng.normal(size=(E, wide, H)), rng.normal(size=(E, H, F))
    if layout.transposed:
        up, down = up.swapaxes(1, 2), down.swapaxes(1, 2)
    inputs: dict[str, Array] = {
        "x": rng.normal(size=(N, H)).astype(dtype),
        # The last expert is chosen by nobody.
        "expert_ids": np.stack([rng.permutation(E - 1)[:K] for _ in range(N)]),
        "expert_weights": rng.random((N, K)).astype(np.float32),
        "up_weight": np.ascontiguousarray(up, dtype),
        "down_weight": np.ascontiguousarray(down, dtype),
    }
    if layout.bias:
        inputs["up_bias"] = rng.normal(size=(E, wide)).astype(dtype)
        inputs["down_bias"] = rng.normal(size=(E, H)).astype(dtype)
    return inputs


def expected_of(layout: ExpertLayout, inputs: dict[str, Array]) -> Array:
    up, down = (inputs[n].astype(np.float64) for n in ("up_weight", "down_weight"))
    if layout.transposed:
        up, down = up.swapaxes(1, 2), down.swapaxes(1, 2)
    y = np.zeros((N, H))
    for n, k in np.ndindex(N, K):
        e = inputs["expert_ids"][n, k]
        h = up[e] @ inputs["x"][n] + (inputs["up_bias"][e] if layout.bias else 0)
        out = down[e] @ one_expert(layout, h) + (inputs["down_bias"][e] if layout.bias else 0)
        y[n] += inputs["expert_weights"][n, k] * out
    return y


def model_of(layout: ExpertLayout, inputs: dict[str, Array]) -> ir.Model:
    """A model whose only node is the call; all inputs are graph inputs."""
    values = [ir.val(n, _TYPES[a.dtype.name], a.shape) for n, a in inputs.items()]
    attributes = {"alpha": ALPHA, "beta": BETA, "limit": LIMIT}
    node = ir.node(layout.name, values, attributes, domain=DOMAIN)
    node.outputs[0].name, node.outputs[0].shape = "y", ir.Shape((N, H))
    node.outputs[0].type = values[0].type
    graph = ir.Graph(
        values, node.outputs, nodes=[node], opset_imports={"": OPSET, DOMAIN: 1}, name="g"
    )
    model = ir.Model(graph, ir_version=10)
    define_functions(model)
    return model


def run(model: ir.Model, inputs: dict[str, Array]) -> Array:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found: Array = session.run(None, inputs)[0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_body_is_what_its_name_says(layout: ExpertLayout) -> None:
    inputs = inputs_of(layout)
    expected = expected_of(layout, inputs)
    found = run(model_of(layout, inputs), inputs)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_half_precision_sums_in_float() -> None:
    layout = ExpertLayout("swiglu", clamped=True, interleaved=True, transposed=True, bias=True)
    inputs = inputs_of(layout, "float16")
    expected = expected_of(layout, inputs)
    found = run(model_of(layout, inputs), inputs)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected, atol=5e-3 * np.abs(expected).max())


def test_a_layout_and_its_name_say_the_same() -> None:
    assert all(ExpertLayout.from_name(layout.name) == layout for layout in LAYOUTS)
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)


@pytest.mark.parametrize(
    "name", ["MixtureOfExperts", "MixtureOfExperts_tanh", "MixtureOfExperts_relu_gated_twice"]
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ExportError, match="is defined"):
        function_for(name)
