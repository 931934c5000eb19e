"""`tensorrt`: which layers become Attention, which are written out, and that answers stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.errors import LoweringError, ParityError, UsageError
from headport.lowering import Options, lower
from headport.lowering.tensorrt import attention
from headport.runner import PortableRunner, open_runner
from headport.selftest import run_selftest
from headport.session import SessionSettings
from tests.lowering.backbones import CONTEXT, HIDDEN, VOCAB, Layer, attention_backbone
from tests.toy_bundles import write_toy


def bundle_of(folder: Path, *layers: Layer, half: bool = True) -> Bundle:
    kind = np.float16 if half else np.float32
    weight = np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)).astype(kind)
    backbone = attention_backbone(layers, half=half)
    return write_toy(folder, weight, backbone=backbone, max_context=CONTEXT)


def lowered(source: Bundle, output: Path) -> tuple[Bundle, dict[str, Any]]:
    bundle = lower(Options(bundle=source.path, output=output, target="tensorrt"))
    return bundle, bundle.manifest.provenance.stages[-1].report


def operators(bundle: Bundle) -> list[str]:
    return [node.op_type for node in ir.load(bundle.path / "backbone.onnx").graph]


FUSED = [
    Layer(),
    Layer(window=5),
    Layer(slopes=True),
    Layer(slopes=True, window=5),
    Layer(heads=3, kv_heads=1),
]


@pytest.mark.parametrize("layer", FUSED, ids=str)
def test_masks_are_right_to_the_last_bits_of_float32(
    tmp_path: Path, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TensorRT has no such kernel, ONNX Runtime has; half precision would hide a small fault.
    monkeypatch.setattr(attention, "_TYPES", (ir.DataType.FLOAT,))
    bundle, report = lowered(bundle_of(tmp_path / "a", layer, Layer(), half=False), tmp_path / "b")
    assert operators(bundle).count("Attention") == 2
    assert max(report["parity"]["hidden_states"].values()) < 1e-5


def test_half_precision_becomes_attention(tmp_path: Path) -> None:
    bundle, report = lowered(bundle_of(tmp_path / "a", Layer(window=5), Layer()), tmp_path / "b")
    assert report["lowered"]["CachedAttention → Attention"] == 1
    assert report["lowered"]["CachedAttention_window → Attention"] == 1
    assert operators(bundle).count("Attention") == 2
    assert report["unproved_on"] == "TensorRT"
    assert run_selftest(bundle)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Layer(softcap=2.0), "softcap"),
        (Layer(sinks=True, window=6), "sinks"),
        (Layer(slopes=True, rounded=True), "rounded"),
        (Layer(key_size=12, value_size=4), "wide"),
    ],
    ids=str,
)
def test_what_has_no_kernel_is_written_out(tmp_path: Path, layer: Layer, reason: str) -> None:
    bundle, report = lowered(bundle_of(tmp_path / "a", layer, Layer()), tmp_path / "b")
    assert operators(bundle).count("Attention") == 1
    [line] = [line for line in report["portable"] if "attention layer 0" in line]
    assert "MatMul and Softmax" in line and reason in line


def test_float32_is_written_out_and_no_function_is_left(tmp_path: Path) -> None:
    bundle, report = lowered(bundle_of(tmp_path / "a", Layer(window=5), half=False), tmp_path / "b")
    model = ir.load(bundle.path / "backbone.onnx")
    assert "Attention" not in operators(bundle) and "Softmax" in operators(bundle)
    assert not model.functions and "headport" not in model.opset_imports
    assert max(report["parity"]["hidden_states"].values()) < 1e-5


def test_ports_stay_those_of_growing_caches(tmp_path: Path) -> None:
    source = bundle_of(tmp_path / "a", Layer())
    bundle, _ = lowered(source, tmp_path / "b")
    assert bundle.manifest.graphs["backbone"] == source.manifest.graphs["backbone"]
    assert isinstance(open_runner(bundle), PortableRunner)
    with pytest.raises(UsageError, match="lowered to tensorrt"):
        open_runner(bundle, SessionSettings(provider="cuda"))


def test_masks_are_computed_once_for_equal_layers() -> None:
    model = attention_backbone([Layer(window=5), Layer(), Layer(window=5), Layer()], half=True)
    attention.lower_attention(model)
    masks = {n.inputs[3].name for n in model.graph if n.op_type == "Attention"}
    assert len(masks) == 2
    assert [n.op_type for n in model.graph].count("CumSum") == 2


def test_padding_that_may_look_nowhere_stays_finite(tmp_path: Path) -> None:
    bundle, _ = lowered(bundle_of(tmp_path / "a", Layer()), tmp_path / "b")
    runner = open_runner(bundle)
    assert isinstance(runner, PortableRunner)
    cache = runner.new_cache(1, 8)
    valid = np.array([[False, False, True, True]])
    assert np.isfinite(runner.append(cache, np.array([[0, 0, 3, 4]]), valid)).all()


@pytest.mark.parametrize("fault", ["window", "causal", "scale"])
def test_a_wrong_mask_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    right = attention._lower

    def wrong(model: Any, call: Any, inputs: Any, masks: Any) -> None:
        changed = {"window": 6, "scale": 0.4}.get(fault)
        if changed is not None:
            kind = ir.AttrInt64 if fault == "window" else ir.AttrFloat32
            call.attributes[fault] = kind(fault, changed)
        right(model, call, inputs, masks)
        for node in model.graph:
            if fault == "causal" and node.op_type == "And":
                node.replace_input_with(0, node.inputs[1])

    monkeypatch.setattr(attention, "_lower", wrong)
    with pytest.raises(ParityError, match="backbone"):
        lowered(bundle_of(tmp_path / "a", Layer(window=5)), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_recurrent_layers_are_refused_by_name() -> None:
    from headport.lowering.targets import TARGETS

    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 23, "headport": 1]> '
        "g (float[1] x) => (float[1] y) {y = headport.SelectiveScan (x)}"
    )
    with pytest.raises(LoweringError, match=r"SelectiveScan.*TensorRT"):
        TARGETS["tensorrt"].backbone[0](model)
