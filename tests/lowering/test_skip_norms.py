"""Residual sums and norms in one operator: same numbers, and only where the operator fits."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from headport.lowering.skip_norms import fuse_skip_norms
from tests.lowering.running import run
from tests.toy_bundles import register

SIZE = 6


def _model(
    a: str = "float[batch, sequence, 6]",
    norm: str = "<axis = -1, epsilon = 0.01>",
    weight: int = SIZE,
) -> ir.Model:
    model = ir.from_onnx_text(
        f"""
        <ir_version: 10, opset_import: ["": 23]>
        g (float[batch, sequence, 6] x, {a} a, float[{weight}] w)
          => (float[batch, sequence, 6] y, float[batch, sequence, 6] z)
        <float[batch, sequence, 6] s, float[batch, sequence, 6] n>
        {{
            s = Add (x, a)
            n = RMSNormalization {norm} (s, w)
            y = Neg (n)
            z = Neg (s)
        }}
        """
    )
    register(model, "w", np.linspace(0.5, 2, weight, dtype=np.float32))
    return model


def _feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(2, 3, SIZE)).astype(np.float32) for name in "xa"}


def test_same_numbers() -> None:
    before, after = _model(), _model()
    [match] = fuse_skip_norms(after)
    assert match.became == "SkipSimplifiedLayerNormalization"
    assert [n.op_type for n in after.graph] == ["SkipSimplifiedLayerNormalization", "Neg", "Neg"]
    for name, expected in run(before, _feeds()).items():
        np.testing.assert_allclose(run(after, _feeds())[name], expected, rtol=1e-6, atol=1e-6)


def test_epsilon_is_taken_over() -> None:
    # Sabotage: with another epsilon the numbers above would differ by far more than allowed.
    after = _model()
    fuse_skip_norms(after)
    expected = run(after, _feeds())["y"]
    fused = next(n for n in after.graph if n.domain)
    fused.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-6)
    assert np.abs(run(after, _feeds())["y"] - expected).max() > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {"a": "float[6] "},  # a bias, not a residual
        {"a": "float[1, sequence, 6]"},
        {"norm": "<axis = 1>", "weight": 1},
    ],
)
def test_what_does_not_fit_stays(options: dict[str, str]) -> None:
    model = _model(**options)  # type: ignore[arg-type]
    assert fuse_skip_norms(model) == []
    assert [n.op_type for n in model.graph][:2] == ["Add", "RMSNormalization"]


def test_unnamed_dimensions_are_not_taken_for_equal() -> None:
    model = _model()
    add = next(n for n in model.graph if n.op_type == "Add")
    for value in (*add.inputs, *add.outputs):
        assert value is not None
        value.shape = ir.Shape([None, None, SIZE])
    assert fuse_skip_norms(model) == []
