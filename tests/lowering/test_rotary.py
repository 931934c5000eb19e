"""Rotary positions inside attention: tables that are the graph's own, and when there are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.cache_ports import cache_slots
from headport.errors import ParityError
from headport.graphs import load_graphs
from headport.lowering import Options, lower
from headport.lowering import rotary as rotary_module
from headport.lowering.attention import lower_attention
from headport.lowering.in_place import add_step_inputs
from headport.lowering.positions import lower_positions
from headport.lowering.rotary import rotate_inside
from headport.lowering.targets import TARGETS, Sized
from tests.lowering.backbones import CONTEXT, HIDDEN, VOCAB, Layer, attention_backbone
from tests.toy_bundles import write_toy

WHOLE = Layer(key_size=16, value_size=16, angles=8)
INSIDE = "RotaryEmbedding of q and k → inside GroupQueryAttention"


def _bundle(folder: Path, layers: list[Layer], half: bool = False) -> Bundle:
    kind = np.float16 if half else np.float32
    weight = np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)).astype(kind)
    return write_toy(
        folder, weight, backbone=attention_backbone(layers, half=half), max_context=CONTEXT
    )


def _lower(source: Bundle, output: Path) -> dict[str, Any]:
    bundle = lower(Options(bundle=source.path, output=output, target="ort-cpu"))
    report: dict[str, Any] = bundle.manifest.provenance.stages[-1].report
    return report


def _rotated(layers: list[Layer], slots: int = 40) -> tuple[ir.Model, list[str]]:
    model = attention_backbone(layers)
    for rewrite in (add_step_inputs, lower_positions, lower_attention):
        rewrite(model)
    return model, [match.reason for match in rotate_inside(model, slots)]


@pytest.mark.parametrize(
    "layer",
    [
        WHOLE,
        replace(WHOLE, window=5),
        replace(WHOLE, interleaved=1),
        replace(WHOLE, key_size=32, value_size=32),  # half of each head turns
        replace(WHOLE, key_size=32, value_size=32, angles=16, softcap=2.0),
    ],
    ids=str,
)
def test_same_answers(tmp_path: Path, layer: Layer) -> None:
    report = _lower(_bundle(tmp_path / "a", [layer, Layer()]), tmp_path / "b")
    assert report["lowered"][INSIDE] == 1
    assert max(report["parity"]["hidden_states"].values()) < 3e-5


def test_half_precision(tmp_path: Path) -> None:
    report = _lower(_bundle(tmp_path / "a", [WHOLE], half=True), tmp_path / "b")
    assert report["lowered"][INSIDE] == 1
    assert max(report["parity"]["hidden_states"].values()) < 5e-3


def test_tables_are_what_the_graph_computes(tmp_path: Path) -> None:
    source = _bundle(tmp_path / "a", [WHOLE, WHOLE])
    _lower(source, tmp_path / "b")
    graph = load_graphs(Bundle.open(tmp_path / "b"))["backbone"].graph
    tables = {n: v for n, v in graph.initializers.items() if ".rotary." in n}
    assert sorted(tables) == [
        f"headport.rotary.{layer}.{name}" for layer in (0, 1) for name in ("cos", "sin")
    ]
    assert not any(n.op_type in ("Cos", "Sin", "RotaryEmbedding") for n in graph)
    angles = np.arange(cache_slots(CONTEXT))[:, None] * 3.0 ** -np.arange(8)
    for name, table in tables.items():
        wanted = np.cos(angles) if name.endswith("cos") else np.sin(angles)
        assert table.const_value is not None
        np.testing.assert_allclose(table.const_value.numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (replace(WHOLE, angles=4), "does not turn 8 of 16"),
        (Layer(key_size=8, value_size=8, angles=4), "does not turn 8 of 8"),
    ],
)
def test_what_the_operator_cannot_turn_stays(layer: Layer, reason: str) -> None:
    model, reasons = _rotated([layer])
    assert len(reasons) == 1 and reason in reasons[0]
    assert sum(n.op_type == "RotaryEmbedding" for n in model.graph) == 2


def test_different_angles_for_q_and_k_stay() -> None:
    model, reasons = _rotated([replace(WHOLE, key_factor=2.0)])
    assert reasons == []
    assert sum(n.op_type == "RotaryEmbedding" for n in model.graph) == 2


def test_large_tables_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary_module, "_LEAST_BYTES", 100)
    _, reasons = _rotated([WHOLE])
    assert "tables for 40 positions would take" in reasons[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        # the angles of a long context, as longrope does it
        (
            "top = ReduceMax (column) over = Greater (top, ten) "
            "longer = Where (over, half, one) scaled = Mul (degrees, longer)",
            "other positions",
        ),
        (
            "ids = Cast <to = 1> (input_ids) more = Unsqueeze (ids, axis_2) "
            "scaled = Add (degrees, more)",
            "more than the position",
        ),
    ],
)
def test_angles_that_are_no_table_stay(text: str, reason: str) -> None:
    model = attention_backbone([WHOLE])
    for rewrite in (add_step_inputs, lower_positions):
        rewrite(model)
    _insert(model, text)
    lower_attention(model)
    [match] = rotate_inside(model, 40)
    assert match.became is None and reason in match.reason


def _insert(model: ir.Model, text: str) -> None:
    """Compute `scaled` by the text and turn by it instead of `degrees`."""
    values = {v.name: v for node in model.graph for v in node.outputs}
    values |= {v.name: v for v in model.graph.inputs}
    patch = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 23]> g (float[b, s] column, float[b, s, o] degrees, '
        "int64[b, s] input_ids, int64[1] axis_2) => (float[b, s, o] scaled) {"
        "ten = Constant <value_float = 10.0> () half = Constant <value_float = 0.5> () "
        f"one = Constant <value_float = 1.0> () {text} }}"
    )
    anchor = next(n for n in model.graph if n.op_type == "Mul")
    for port in list(patch.graph.inputs):
        ir.convenience.replace_all_uses_with(port, values[port.name])
    scaled = patch.graph.outputs[0]
    patch.graph.outputs.clear()
    for node in list(patch.graph):
        patch.graph.remove(node)
        for value in node.outputs:
            if value.name in ("ten", "half", "one"):
                value.name = f"patched_{value.name}"
        model.graph.insert_before(anchor, node)
    anchor.replace_input_with(0, scaled)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shifted_table_is_caught(
    tmp_path: Path, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sabotage(model: ir.Model, slots: int) -> list[Any]:
        matches = rotate_inside(model, slots)
        for name, value in model.graph.initializers.items():
            if name.endswith(".sin") and value.const_value is not None:
                value.const_value = ir.tensor(np.roll(value.const_value.numpy(), shift, 0))
        return matches

    honest = TARGETS["ort-cpu"]
    passes = tuple(Sized(sabotage) if isinstance(p, Sized) else p for p in honest.backbone)
    monkeypatch.setitem(TARGETS, "ort-cpu", replace(honest, backbone=passes))
    with pytest.raises(ParityError):
        _lower(_bundle(tmp_path / "a", [WHOLE]), tmp_path / "b")
