"""Finding the matrices of a backbone: every way a product reads one, and what is left."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from headport.lowering.matrices import find_matrices, find_products, find_tables
from tests.quantize import mlp_bundles as mlp
from tests.toy_bundles import register


def _model(body: str, **shapes: tuple[int, ...]) -> ir.Model:
    ports = "".join(f", float[{', '.join(map(str, s))}] {name}" for name, s in shapes.items())
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["": 23]>
        backbone (int64[batch, sequence] input_ids, float[n, 5] x{ports}) => (float[n, 7] y)
        {{ {body} }}
    """)
    for name, shape in shapes.items():
        register(model, name, np.ones(shape, np.float32))
    return model


@pytest.mark.parametrize(
    ("body", "shape", "rows_first"),
    [
        ("y = MatMul (x, w)", (5, 7), False),
        ("t = Transpose <perm = [1, 0]> (w) y = MatMul (x, t)", (7, 5), True),
        ("t = Transpose (w) y = MatMul (x, t)", (7, 5), True),
        ("y = Gemm (x, w)", (5, 7), False),
        ("y = Gemm <transB = 1> (x, w)", (7, 5), True),
        ("t = Transpose (w) y = Gemm <transB = 1> (x, t)", (5, 7), False),
    ],
)
def test_every_product_with_a_matrix(body: str, shape: tuple[int, ...], rows_first: bool) -> None:
    (matrix,), left = find_matrices(_model(body, w=shape))
    assert (matrix.name, matrix.rows_first, matrix.shape, left) == ("w", rows_first, (7, 5), {})


@pytest.mark.parametrize(
    ("body", "shape", "why"),
    [
        ("t = Transpose <perm = [0, 1]> (w) y = MatMul (x, t)", (5, 7), "read by Transpose"),
        ("y = MatMul (w, x)", (7, 5), "read by MatMul"),
        ("y = Gemm <alpha = 2.0> (x, w)", (5, 7), "read by Gemm"),
        ("y = Gemm <transA = 1> (x, w)", (5, 7), "read by Gemm"),
        ("a = MatMul (x, w) b = ReduceSum (w) y = Add (a, b)", (5, 7), "read by MatMul, ReduceSum"),
        ("y = MatMul (x, w)", (1, 5, 7), "read by MatMul"),
        ("y = Mul (x, w)", (5, 7), "read by Mul"),
        ("y = MatMul (x, w) z = Gather (w, input_ids)", (5, 7), "read by Gather, MatMul"),
    ],
)
def test_what_is_left(body: str, shape: tuple[int, ...], why: str) -> None:
    assert find_matrices(_model(body, w=shape)) == ([], {"w": why})


def test_a_matrix_that_is_read_both_ways_is_left() -> None:
    body = "a = MatMul (x, w) t = Transpose (w) y = MatMul (a, t)"
    assert find_matrices(_model(body, w=(5, 5))) == ([], {"w": "read by MatMul"})


def test_tables_are_looked_up_by_token_id_alone() -> None:
    def names(body: str) -> list[str]:
        return [table.name for table in find_tables(_model(body, w=(9, 7)))]

    assert names("y = Gather (w, input_ids)") == ["w"]
    assert names("i = Cast <to = 6> (input_ids) y = Gather (w, i)") == ["w"]
    assert names("i = Range (x, x, x) y = Gather (w, i)") == [], "positions"
    assert names("y = Gather <axis = 1> (w, input_ids)") == []
    assert names("a = Gather (w, input_ids) y = Add (a, w)") == []


def test_matrices_of_a_whole_backbone() -> None:
    model = mlp.backbone(mlp.weights())
    matrices, left = find_matrices(model)
    assert [m.name for m in matrices] == [mlp.UP, mlp.DOWN, mlp.MIX, mlp.GATE]
    assert [len(m.products) for m in matrices] == [1, 1, 2, 1]
    assert left == {mlp.STACK: "read by MatMul"}
    assert [t.name for t in find_tables(model)] == [mlp.EMBED]
    assert find_products(model) == []
