"""`ort-cuda`: what it becomes, what stays, what is refused. Answers are compared on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.errors import LoweringError, ParityError
from headport.lowering import Options, lower
from headport.lowering.attention import CUDA_KERNEL, lower_attention
from headport.lowering.command import run
from headport.lowering.in_place import UNIFORM_STEP, add_step_inputs
from headport.lowering.targets import TARGETS
from headport.selftest import run_selftest
from headport.session import SessionSettings
from tests.lowering.backbones import CONTEXT, HIDDEN, VOCAB, Layer, attention_backbone
from tests.toy_bundles import write_toy

pytestmark = pytest.mark.skipif(
    "CUDAExecutionProvider" in __import__("onnxruntime").get_available_providers(),
    reason="with a GPU the target is compared there, by gpu-check",
)


def _bundle(folder: Path, *layers: Layer, half: bool = True, extra: str = "") -> Bundle:
    kind = np.float16 if half else np.float32
    weight = np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)).astype(kind)
    backbone = attention_backbone(layers, half=half, extra=extra)
    return write_toy(folder, weight, backbone=backbone, max_context=CONTEXT)


def _lower(source: Bundle, output: Path) -> tuple[Bundle, dict[str, Any]]:
    bundle = lower(Options(bundle=source.path, output=output, target="ort-cuda"))
    return bundle, bundle.manifest.provenance.stages[-1].report


@pytest.mark.parametrize(
    "layer",
    [
        Layer(window=5, softcap=2.0),
        Layer(sinks=True, window=6),
        Layer(slopes=True),
        Layer(heads=3, kv_heads=1),
        Layer(key_size=12, value_size=4),
    ],
    ids=str,
)
def test_same_answers(tmp_path: Path, layer: Layer) -> None:
    bundle, report = _lower(_bundle(tmp_path / "a", layer, Layer()), tmp_path / "b")
    assert report["lowered"][f"{layer.function} → GroupQueryAttention"] >= 1
    assert report["lowered"]["Positions → position_ids"] == 1
    assert max(report["parity"]["hidden_states"].values()) < 6e-3
    assert (report["checked_on"], report["unproved_on"]) == (
        "CPUExecutionProvider",
        "CUDAExecutionProvider",
    )
    assert run_selftest(bundle, SessionSettings(provider="cpu"))
    ports = [port.name for port in bundle.manifest.graphs["backbone"].inputs]
    assert ports[:4] == ["input_ids", "position_ids", "seqlens_k", "total_sequence_length"]
    assert "query_seqlens" not in ports and "attention_mask" not in ports


def test_the_operator_is_that_of_onnx_runtime_1_31() -> None:
    model = attention_backbone([Layer(window=5)], half=True)
    add_step_inputs(model, UNIFORM_STEP)
    lower_attention(model, CUDA_KERNEL)
    node = next(n for n in model.graph if n.op_type == "GroupQueryAttention")
    assert len(node.inputs) == 7  # nothing behind total_sequence_length


def test_no_shape_is_computed(tmp_path: Path) -> None:
    # A GPU leaves such arithmetic to the CPU, which strict placement refuses.
    bundle, _ = _lower(_bundle(tmp_path / "a", Layer(slopes=True), Layer()), tmp_path / "b")
    operators = {node.op_type for node in ir.load(bundle.path / "backbone.onnx").graph}
    assert not operators & {"Shape", "Size", "NonZero", "Squeeze"}


@pytest.mark.parametrize("name", ["position_ids", "seqlens_k"])
def test_a_wrong_step_input_is_caught(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sabotage(model: ir.Model) -> list[Any]:
        value = next(v for v in model.graph.inputs if v.name == name)
        dtype = np.int64 if name == "position_ids" else np.int32
        one = ir.val("one", const_value=ir.tensor(np.array(1, dtype), name="one"))
        model.graph.register_initializer(one)
        uses = list(value.uses())
        more = ir.node("Sub", [value, one], name="sabotage")
        bounded = ir.node("Abs", [more.outputs[0]], name="sabotage.abs")
        for use in uses:
            use.node.replace_input_with(use.idx, bounded.outputs[0])
        model.graph.insert_before(model.graph[0], [more, bounded])
        return []

    _sabotage(monkeypatch, sabotage)
    with pytest.raises(ParityError, match="lowered backbone does not answer"):
        _lower(_bundle(tmp_path / "a", Layer()), tmp_path / "b")


def _sabotage(monkeypatch: pytest.MonkeyPatch, sabotage: Any) -> None:
    from dataclasses import replace

    honest = TARGETS["ort-cuda"]
    faulty = replace(honest, backbone=(*honest.backbone, sabotage))
    monkeypatch.setitem(TARGETS, "ort-cuda", faulty)


def test_float32_stays_portable_and_says_so(tmp_path: Path) -> None:
    source = _bundle(tmp_path / "a", Layer(window=5), Layer(sinks=True, slopes=True), half=False)
    bundle, report = _lower(source, tmp_path / "b")
    reason = "no CUDA kernel computes it in this type; its caches grow"
    assert report["portable"][:2] == [
        f"attention layer 0: CachedAttention_window ({reason})",
        f"attention layer 1: CachedAttention_sinks_slopes ({reason})",
    ]
    assert max(report["parity"]["hidden_states"].values()) == 0
    assert bundle.manifest.target == "ort-cuda"


def test_what_no_kernel_computes_is_refused(tmp_path: Path) -> None:
    source = _bundle(tmp_path / "a", Layer(), Layer(sinks=True, slopes=True))
    with pytest.raises(LoweringError, match=r"attention layer 1: it has both sinks and a bias"):
        _lower(source, tmp_path / "b")
    model = attention_backbone([Layer()], half=True)
    model.graph.append(
        ir.node("MixtureOfExperts_swiglu", [model.graph.inputs[0]], domain="headport")
    )
    with pytest.raises(LoweringError, match=r"MixtureOfExperts_swiglu, which have no proved form"):
        for rewrite in TARGETS["ort-cuda"].passes(model, CONTEXT):
            rewrite(model)
    assert not (tmp_path / "b").exists()


def test_the_command_says_what_is_unproved(tmp_path: Path) -> None:
    source = _bundle(tmp_path / "a", Layer())
    outcome = run(Options(bundle=source.path, output=tmp_path / "b", target="ort-cuda"))
    assert (
        "checked on CPUExecutionProvider, unproved on CUDAExecutionProvider until "
        "`headport gpu-check`"
    ) in outcome.text
