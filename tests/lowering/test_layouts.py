"""Layouts that are undone at once disappear; others stay."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from headport.lowering.layouts import straighten


def _model(nodes: str, result: str = "float[batch, heads, sequence, 4]") -> ir.Model:
    return ir.from_onnx_text(
        f"""
        <ir_version: 10, opset_import: ["": 23]>
        g (float[batch, heads, sequence, 4] x, int64[3] flat, int64[4] full) => ({result} y)
        <float[batch, sequence, 8] a, float[batch, sequence, 8] b, float[sequence, batch, 8] c>
        {{ {nodes} }}
        """
    )


def _inputs_of_last(model: ir.Model) -> list[str | None]:
    straighten(model)
    last = list(model.graph)[-1]
    return [value.name if value else None for value in last.inputs]


@pytest.mark.parametrize(
    ("first", "second", "gone"),
    [
        ((0, 2, 1, 3), (0, 2, 1, 3), True),
        ((1, 2, 3, 0), (3, 0, 1, 2), True),
        ((1, 2, 3, 0), (1, 2, 3, 0), False),
        ((0, 1, 3, 2), (0, 2, 1, 3), False),
    ],
)
def test_transposes(first: tuple[int, ...], second: tuple[int, ...], gone: bool) -> None:
    model = _model(
        f"t = Transpose <perm = {list(first)}> (x) u = Transpose <perm = {list(second)}> (t)"
        "y = Neg (u)"
    )
    assert _inputs_of_last(model) == ["x" if gone else "u"]


@pytest.mark.parametrize(("middle", "gone"), [("b", True), ("c", False)])
def test_reshapes(middle: str, gone: bool) -> None:
    # a and b have the same shape; c has as many numbers in another order.
    model = _model(
        f"z = Reshape (x, flat) a = Neg (z) q = Reshape (a, full) {middle} = Reshape (q, flat)"
        f"y = Neg ({middle})",
        "float[i, j, k] ",
    )
    assert _inputs_of_last(model) == ["a" if gone else middle]


def test_unnamed_dimensions_are_not_taken_for_equal() -> None:
    model = _model("p = Reshape (x, flat) q = Reshape (p, full) r = Reshape (q, flat) y = Neg (r)")
    values = {v.name: v for node in model.graph for v in node.outputs}
    for name in "pr":
        values[name].shape = ir.Shape([None, None, 8])
    assert _inputs_of_last(model) == ["r"]


def test_a_graph_output_stays() -> None:
    model = _model(
        "t = Transpose <perm = [1, 0, 2, 3]> (x) y = Transpose <perm = [1, 0, 2, 3]> (t)"
    )
    assert straighten(model) == []
    assert model.graph.outputs[0].producer() is not None


def test_what_else_reads_the_first_stays() -> None:
    model = _model(
        "t = Transpose <perm = [1, 0, 2, 3]> (x) u = Transpose <perm = [1, 0, 2, 3]> (t)"
        "v = Neg (t) w = Transpose <perm = [1, 0, 2, 3]> (v) y = Add (u, w)"
    )
    assert _inputs_of_last(model) == ["x", "w"]
