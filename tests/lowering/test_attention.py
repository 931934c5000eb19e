"""Attention lowered to GroupQueryAttention: its form, and the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.errors import LoweringError, ParityError
from headport.lowering import Options, lower
from headport.lowering.attention import attention_windows, lower_attention
from headport.lowering.in_place import add_step_inputs
from headport.lowering.targets import TARGETS
from tests.lowering.backbones import CONTEXT, HIDDEN, VOCAB, Layer, attention_backbone
from tests.toy_bundles import write_toy


def _bundle(folder: Path, layers: list[Layer], half: bool = False) -> Bundle:
    kind = np.float16 if half else np.float32
    weight = np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)).astype(kind)
    backbone = attention_backbone(layers, half=half)
    return write_toy(folder, weight, backbone=backbone, max_context=CONTEXT)


def _lower(source: Bundle, output: Path) -> dict[str, Any]:
    bundle = lower(Options(bundle=source.path, output=output, target="ort-cpu"))
    report: dict[str, Any] = bundle.manifest.provenance.stages[-1].report
    return report


@pytest.mark.parametrize(
    "layer",
    [
        Layer(),
        Layer(window=1),
        Layer(window=5),
        Layer(softcap=2.0),
        Layer(window=7, softcap=1.0),
        Layer(sinks=True),
        Layer(sinks=True, window=6),
        Layer(slopes=True),
        Layer(slopes=True, window=6, softcap=3.0),
        Layer(slopes=True, sinks=True),
        Layer(slopes=True, rounded=True),
        Layer(heads=4, kv_heads=4),
        Layer(heads=3, kv_heads=1),
        Layer(key_size=12, value_size=12),
        Layer(key_size=7, value_size=5, window=4),
        Layer(key_size=16, value_size=8),
        Layer(key_size=8, value_size=24),
    ],
    ids=str,
)
def test_same_answers(tmp_path: Path, layer: Layer) -> None:
    report = _lower(_bundle(tmp_path / "a", [layer, Layer()]), tmp_path / "b")
    assert report["lowered"][f"{layer.function} → GroupQueryAttention"] >= 1
    assert max(report["parity"]["hidden_states"].values()) < 1e-5
    assert report["parity"]["positions"] > 100


@pytest.mark.parametrize(
    "layer", [Layer(), Layer(window=5, softcap=2.0), Layer(sinks=True, slopes=True)], ids=str
)
def test_half_precision(tmp_path: Path, layer: Layer) -> None:
    report = _lower(_bundle(tmp_path / "a", [layer], half=True), tmp_path / "b")
    assert max(report["parity"]["hidden_states"].values()) < 5e-3


@pytest.mark.parametrize(
    ("name", "value"),
    [("local_window_size", 6), ("local_window_size", 4), ("softcap", 2.1), ("scale", 0.49)],
)
def test_a_wrong_attribute_is_caught(
    tmp_path: Path, name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sabotage(model: ir.Model) -> list[Any]:
        for node in model.graph:
            if node.op_type == "GroupQueryAttention":
                kind = ir.AttrInt64 if isinstance(value, int) else ir.AttrFloat32
                node.attributes[name] = kind(name, value)
        return []

    _sabotage_backbone(monkeypatch, sabotage)
    with pytest.raises(ParityError, match="lowered backbone does not answer"):
        _lower(_bundle(tmp_path / "a", [Layer(window=5, softcap=2.0)]), tmp_path / "b")


@pytest.mark.parametrize("place", [10, 11])
def test_a_lost_bias_or_sink_is_caught(
    tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sabotage(model: ir.Model) -> list[Any]:
        for node in model.graph:
            if node.op_type == "GroupQueryAttention":
                node.replace_input_with(place, None)
        return []

    _sabotage_backbone(monkeypatch, sabotage)
    with pytest.raises(ParityError, match="lowered backbone does not answer"):
        _lower(_bundle(tmp_path / "a", [Layer(sinks=True, slopes=True)]), tmp_path / "b")


def _sabotage_backbone(monkeypatch: pytest.MonkeyPatch, sabotage: Any) -> None:
    from dataclasses import replace

    honest = TARGETS["ort-cpu"]
    faulty = replace(honest, backbone=(*honest.backbone, sabotage))
    monkeypatch.setitem(TARGETS, "ort-cpu", faulty)


def test_form() -> None:
    model = attention_backbone([Layer(window=5, softcap=2.0)])
    assert attention_windows(model) == (5,)
    add_step_inputs(model)
    matches = lower_attention(model)
    assert [(m.where, m.was, m.became) for m in matches] == [
        ("attention layer 0", "CachedAttention_softcap_window", "GroupQueryAttention")
    ]
    node = next(n for n in model.graph if n.op_type == "GroupQueryAttention")
    assert {name: a.value for name, a in node.attributes.items()} == {
        "num_heads": 4,
        "kv_num_heads": 2,
        "scale": 0.5,
        "local_window_size": 5,
        "softcap": 2.0,
    }
    names = [value.name if value else None for value in node.inputs]
    assert names[3:7] == [
        "past_key_values.0.key",
        "past_key_values.0.value",
        "seqlens_k",
        "total_sequence_length",
    ]
    assert names[7:16] == [None] * 9 and names[16] == "query_seqlens"
    assert [v.name for v in node.outputs[1:]] == ["present.0.key", "present.0.value"]
    assert not any(n.domain == "headport" and n.op_type != "Positions" for n in model.graph)


def test_padded_heads_widen_the_caches() -> None:
    model = attention_backbone([Layer(key_size=12, value_size=4)])
    add_step_inputs(model)
    lower_attention(model)
    ports = [v for v in model.graph.inputs if v.name and v.name.startswith("past_key_values.")]
    assert [port.shape[3] for port in ports if port.shape] == [16, 16]


def _refused(model: ir.Model, text: str) -> None:
    add_step_inputs(model)
    with pytest.raises(LoweringError, match=text):
        lower_attention(model)


def test_refusals_name_the_layer() -> None:
    _refused(
        attention_backbone([Layer(), Layer(heads=3, kv_heads=2)]), "attention layer 1: 3 query"
    )
    model = attention_backbone([Layer()])
    call = next(n for n in model.graph if n.op_type == "CachedAttention")
    call.attributes["window"] = ir.AttrInt64("window", 8)
    _refused(model, "attention layer 0: CachedAttention and its attribute window = 8 contradict")
    model = attention_backbone([Layer()])
    call = next(n for n in model.graph if n.op_type == "CachedAttention")
    call.op_type = "CachedAttention_spiral"
    _refused(model, "headport::CachedAttention_spiral is not an attention known here")
    model = attention_backbone([Layer()])
    next(v for v in model.graph.inputs if v.name == "past_key_values.0.key").shape = ir.Shape(
        ["batch", "heads", "past_sequence", 8]
    )
    _refused(model, "attention layer 0: the number or size of its heads is not a constant")
