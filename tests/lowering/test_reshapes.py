"""Computed targets of Reshape become constants only where they copy the input's dimensions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from headport.lowering.reshapes import fix_reshapes
from tests.toy_bundles import register


def _model(parts: str, extra: str = "", attributes: str = "<allowzero = 1>") -> ir.Model:
    model = ir.from_onnx_text(
        f"""
        <ir_version: 10, opset_import: ["": 23]>
        g (int64[batch, sequence] ids, float[batch, sequence, 12] x, int64[1] four,
           int64[1] three, int64[1] zero) => (float[a, b, c, d] y)
        {{
            B = Shape <start = 0, end = 1> (ids)
            T = Shape <start = 1, end = 2> (ids)
            twelve = Shape <start = 2, end = 3> (x)
            {extra}
            target = Concat <axis = 0> ({parts})
            y = Reshape {attributes} (x, target)
        }}
        """
    )
    for name, value in (("four", 4), ("three", 3), ("zero", 0)):
        register(model, name, np.array([value], np.int64))
    return model


def _target(model: ir.Model) -> list[int] | None:
    fix_reshapes(model)
    node = next(n for n in model.graph if n.op_type == "Reshape")
    assert node.inputs[1] is not None
    if node.inputs[1].const_value is None:
        return None
    assert "allowzero" not in node.attributes  # a zero copies
    found: list[int] = node.inputs[1].const_value.numpy().tolist()
    return found


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ("B, T, four, three", [0, 0, 4, 3]),
        ("B, T, twelve", [0, 0, 12]),
        ("T, B, twelve", None),  # swapped: both would have to be worked out
        ("B, four, T, three", [0, 4, -1, 3]),  # T is not where x has it
        ("B, T, zero", None),  # with allowzero a zero is a zero
    ],
)
def test_targets(parts: str, expected: list[int] | None) -> None:
    assert _target(_model(parts)) == expected


def test_what_stays_is_reported() -> None:
    [match] = fix_reshapes(_model("T, B, twelve"))
    assert match.became is None and match.reason.startswith("its target is not made of")


def test_other_arithmetic_stays() -> None:
    assert _target(_model("B, T2, three", extra="T2 = Mul (T, four)")) is None
