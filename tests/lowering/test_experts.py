"""Experts as ONNX Runtime's own operator: the same answers, and a reason where it stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest

from headport.export.expert_function import ExpertLayout
from headport.lowering.experts import lower_experts
from tests.export.test_expert_function import (
    LAYOUTS,
    E,
    H,
    K,
    N,
    expected_of,
    inputs_of,
    model_of,
)

Array = npt.NDArray[Any]
LOWERED = [
    layout
    for layout in LAYOUTS
    if (layout.activation == "swiglu" and layout.gated)
    or (layout.activation in ("relu", "gelutanh") and not layout.gated)
]


def with_weights(layout: ExpertLayout, inputs: dict[str, Array]) -> ir.Model:
    """A model whose matrices are initialisers, as in a bundle."""
    model = model_of(layout, inputs)
    for value in list(model.graph.inputs):
        assert value.name is not None
        if "weight" in value.name.removeprefix("expert_weights") or "bias" in value.name:
            model.graph.inputs.remove(value)
            value.const_value = ir.Tensor(inputs[value.name], name=value.name)
            model.graph.register_initializer(value)
    return model


def run(model: ir.Model, inputs: dict[str, Array]) -> Array:
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = {port.name for port in session.get_inputs()}
    found: Array = session.run(None, {n: a for n, a in inputs.items() if n in names})[0]
    return found


@pytest.mark.parametrize("layout", LOWERED, ids=lambda layout: layout.name)
def test_the_operator_answers_like_the_function(layout: ExpertLayout) -> None:
    inputs = inputs_of(layout)
    model = with_weights(layout, inputs)
    matches = lower_experts(model)
    assert [match.became for match in matches] == ["MoE"]
    assert not any(node.domain == "headport" for node in model.graph)
    expected = expected_of(layout, inputs)
    found = run(model, inputs)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("weights", ["one zero", "tiny", "large"])
def test_any_weights_above_zero_are_kept(weights: str) -> None:
    layout = ExpertLayout("swiglu")
    inputs = inputs_of(layout)
    given = inputs["expert_weights"]
    if weights == "one zero":
        given[:, 0] = 0
    else:
        given *= np.float32({"tiny": 1e-20, "large": 1e6}[weights])
    expected = expected_of(layout, inputs)
    model = with_weights(layout, inputs)
    lower_experts(model)
    np.testing.assert_allclose(
        run(model, inputs), expected, atol=2e-5 * np.abs(expected).max(), rtol=0
    )


def test_all_experts_can_be_chosen() -> None:
    layout = ExpertLayout("swiglu", transposed=True)
    inputs = inputs_of(layout)
    inputs["expert_ids"] = np.tile(np.arange(E), (N, 1))
    inputs["expert_weights"] = np.random.default_rng(1).random((N, E)).astype(np.float32)
    expected = np.zeros((N, H))
    for k in range(E):
        part = dict(inputs)
        part["expert_ids"] = np.tile(inputs["expert_ids"][:, k : k + 1], (1, K))
        part["expert_weights"] = np.tile(inputs["expert_weights"][:, k : k + 1] / K, (1, K))
        expected += expected_of(layout, part)
    model = with_weights(layout, inputs)
    lower_experts(model)
    np.testing.assert_allclose(
        run(model, inputs), expected, atol=2e-5 * np.abs(expected).max(), rtol=0
    )


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (ExpertLayout("gelu"), "no such activation"),
        (ExpertLayout("gelutanh"), "no such activation"),
        (ExpertLayout("relu2", gated=False), "no such activation"),
        (ExpertLayout("gelu", gated=False), "no such activation"),
        (ExpertLayout("swiglu", gated=False), "its silu has no alpha"),
    ],
)
def test_what_the_operator_cannot_say_stays_with_a_reason(
    layout: ExpertLayout, reason: str
) -> None:
    model = with_weights(layout, inputs_of(layout))
    (match,) = lower_experts(model)
    assert match.became is None
    assert reason in match.reason
    assert [node.op_type for node in model.graph] == [layout.name]


@pytest.mark.parametrize("clamped", [False, True])
def test_half_precision(clamped: bool) -> None:
    layout = ExpertLayout("swiglu", clamped=clamped, transposed=clamped, bias=clamped)
    inputs = inputs_of(layout, "float16")
    model = with_weights(layout, inputs)
    (match,) = lower_experts(model)
    assert match.became == "MoE"
    expected = expected_of(layout, inputs)
    np.testing.assert_allclose(run(model, inputs), expected, atol=5e-3 * np.abs(expected).max())


def test_other_types_stay() -> None:
    layout = ExpertLayout("swiglu")
    model = with_weights(layout, inputs_of(layout))
    x = model.graph.inputs[0]
    x.type = ir.TensorType(ir.DataType.BFLOAT16)
    (match,) = lower_experts(model)
    assert match.became is None
    assert "float or float16 on CPU" in match.reason


def test_plain_silu() -> None:
    layout = ExpertLayout("swiglu", gated=False)
    inputs = inputs_of(layout)
    model = with_weights(layout, inputs)
    model.graph[0].attributes["alpha"] = ir.AttrFloat32("alpha", 1.0)
    expected = run(model.clone(), inputs)
    (match,) = lower_experts(model)
    assert match.became == "MoE"
    np.testing.assert_allclose(run(model, inputs), expected, atol=2e-5)


def test_matrices_made_in_the_graph_stay() -> None:
    layout = ExpertLayout("swiglu")
    (match,) = lower_experts(model_of(layout, inputs_of(layout)))
    assert "computed in the graph" in match.reason
