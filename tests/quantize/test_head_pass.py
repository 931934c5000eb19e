"""The rewritten head graph, node by node."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from headport.errors import QuantizeError
from headport.quantize.formats import FORMATS
from headport.quantize.head_pass import find_product, store_head_weight
from tests.toy_bundles import head_graph

W = np.arange(12, dtype=np.float32).reshape(3, 4)


def _store(model: ir.Model, kind: str) -> str:
    row = FORMATS[kind]
    return store_head_weight(model, "w", row.store(W, 16), row, 16)


def _ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def test_int8_form() -> None:
    model = head_graph(W, bias=np.ones(3), scale=2.0, softcap=5.0)
    before = _ops(model)
    assert _store(model, "int8") == "w.int8"
    assert _ops(model) == ["DequantizeLinear", *before]
    restore = model.graph[0]
    assert [v.name for v in restore.inputs if v] == ["w.int8", "w.scale"]
    assert {k: a.value for k, a in restore.attributes.items()} == {"axis": 1, "block_size": 16}
    assert model.graph[1].inputs[1] is restore.outputs[0]
    assert sorted(model.graph.initializers) == ["b", "w.int8", "w.scale"]


def test_fp16_form() -> None:
    model = head_graph(W)
    assert _store(model, "fp16") == "w.fp16"
    assert _ops(model)[:2] == ["Cast", "Gemm"]
    assert list(model.graph.initializers) == ["w.fp16"]


def test_cast_of_a_half_precision_weight_is_replaced() -> None:
    model = head_graph(W.astype(np.float16))
    assert _ops(model)[:3] == ["Cast", "Cast", "Gemm"]
    _store(model, "int8")
    assert _ops(model)[:3] == ["Cast", "DequantizeLinear", "Gemm"]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("logits = Gemm (x, w)", "Gemm"),  # not transposed
        ("logits = Gemm <transB = 1, alpha = 2.0> (x, w)", "Gemm"),
        ("logits = Gemm <transB = 1> (w, x)", "Gemm"),  # the weight on the left
        ("t = Transpose (w) logits = MatMul (x, t)", "Transpose"),
        (
            "y = Gemm <transB = 1> (x, w) z = Gemm <transB = 1> (y, w) logits = Add (y, z)",
            "Gemm, G",
        ),
        ("logits = Identity (x)", "nothing"),
    ],
)
def test_other_uses_of_the_weight_are_refused(body: str, found: str) -> None:
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 23]>\n'
        f"g (float[n, 4] x) => (float[n, 4] logits) <float[4, 4] w = {{{', '.join('1' * 16)}}}>"
        f"{{ {body} }}"
    )
    with pytest.raises(QuantizeError, match=f"found: {found}"):
        find_product(model, "w")


def test_unknown_weight_is_refused() -> None:
    with pytest.raises(QuantizeError, match="no initialiser 'nothing'"):
        find_product(head_graph(W), "nothing")
