"""Attention that reads query, key and value from one tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.graphs import load_graphs
from headport.lowering import Options, lower
from headport.lowering.packed_qkv import pack_qkv
from tests.lowering.backbones import CONTEXT, HIDDEN, VOCAB, Layer, attention_backbone
from tests.toy_bundles import write_toy


def _model(split: str, given: str = "q, k, v") -> ir.Model:
    return ir.from_onnx_text(
        f"""
        <ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]>
        g (float[batch, sequence, 16] x, int64[3] sizes, float[batch, 1, past, 4] key,
           float[batch, 1, past, 4] value, int32[batch] seqlens_k, int32 total)
          => (float[batch, sequence, 8] y, float[batch, 1, past, 4] new_key,
              float[batch, 1, past, 4] new_value)
        {{
            {split}
            y, new_key, new_value = com.microsoft.GroupQueryAttention
              <num_heads = 2, kv_num_heads = 1> ({given}, key, value, seqlens_k, total)
        }}
        """
    )


WHOLE = "q, k, v = Split <axis = -1> (x, sizes)"


def test_the_whole_is_handed_on() -> None:
    model = _model(WHOLE)
    assert len(pack_qkv(model)) == 1
    [node] = model.graph
    assert [v.name if v else None for v in node.inputs[:4]] == ["x", None, None, "key"]


@pytest.mark.parametrize(
    ("split", "given"),
    [
        (WHOLE, "q, v, k"),  # sabotage: another order would be read as this one
        ("q, k, v = Split <axis = 1> (x, sizes)", "q, k, v"),
        ("q, k, v, w = Split <axis = -1, num_outputs = 4> (x)", "q, k, v"),
        (f"{WHOLE} z = Neg (k)", "q, k, v"),
        ("q, k, w = Split <axis = -1> (x, sizes) v = Neg (w)", "q, k, v"),
    ],
)
def test_what_is_not_the_whole_stays(split: str, given: str) -> None:
    model = _model(split, given)
    assert pack_qkv(model) == []
    assert sum(n.op_type == "Split" for n in model.graph) == 1


@pytest.mark.parametrize(
    "layer", [Layer(), Layer(window=5, softcap=2.0), Layer(key_size=16, value_size=16, angles=8)]
)
def test_same_answers(tmp_path: Path, layer: Layer) -> None:
    weight = np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    source = write_toy(
        tmp_path / "a", weight, backbone=attention_backbone([layer] * 2), max_context=CONTEXT
    )
    bundle = lower(Options(bundle=source.path, output=tmp_path / "b", target="ort-cpu"))
    report = bundle.manifest.provenance.stages[-1].report
    assert report["lowered"]["Split into q, k, v → packed q, k, v"] == 2
    assert max(report["parity"]["hidden_states"].values()) < 1e-5
    graph = load_graphs(Bundle.open(tmp_path / "b"))["backbone"].graph
    products = [n for n in graph if n.op_type == "MatMul"]
    assert len(products) == 2 * 2  # packed, and the output's


def test_the_portable_function_of_that_name_stays() -> None:
    model = _model(WHOLE)
    node = next(n for n in model.graph if n.op_type == "GroupQueryAttention")
    node.op_type, node.domain = "CachedAttention", "headport"
    assert pack_qkv(model) == []
