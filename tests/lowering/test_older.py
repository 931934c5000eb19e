"""`ort-cpu` for an ONNX Runtime before 1.32: what it becomes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.cli import main
from headport.errors import LoweringError, UsageError
from headport.lowering import Options, lower
from headport.lowering.command import run
from headport.lowering.targets import find_target
from headport.merge.runtimes import RUNTIMES, faults
from headport.runner import DeviceRunner, open_runner
from headport.runtime import Generator
from headport.selftest import run_selftest
from tests.lowering.backbones import CONTEXT, HIDDEN, VOCAB, Layer, attention_backbone
from tests.toy_bundles import write_toy


def _older(source: Path, output: Path) -> Bundle:
    options = Options(bundle=source, output=output, target="ort-cpu", onnxruntime_at_least="1.30")
    return lower(options)


@pytest.fixture(scope="module")
def older(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return _older(tiny_bundle, tmp_path_factory.mktemp("older") / "cpu")


def test_the_operator_is_that_of_onnx_runtime_1_30(older: Bundle) -> None:
    graph = ir.load(older.path / "backbone.onnx").graph
    attention = [n for n in graph if n.op_type == "GroupQueryAttention"]
    assert len(attention) == 2 and {len(n.inputs) for n in attention} == {7}
    ports = [port.name for port in older.manifest.backbone.inputs]
    assert ports[:4] == ["input_ids", "position_ids", "seqlens_k", "total_sequence_length"]
    assert older.manifest.target == "ort-cpu" and run_selftest(older)
    assert isinstance(open_runner(older), DeviceRunner)
    stage = older.manifest.provenance.stages[-1]
    assert stage.options == {"target": "ort-cpu", "onnxruntime_at_least": "1.30"}
    assert stage.report["unproved_on"] == "ONNX Runtime 1.30"


def test_it_generates_what_the_newest_form_does(older: Bundle, tiny_lowered: Path) -> None:
    prompts = [[5, 9, 2], [17], [40, 41, 42, 43]]
    for options in ({}, {"temperature": 1.0, "seed": 3, "n": 2}, {"num_beams": 3}):
        found, expected = (
            [
                reply.token_ids
                for reply in Generator(path, threads=1, slots=4).generate(
                    prompts, max_new_tokens=12, **options
                )
            ]
            for path in (older.path, tiny_lowered)
        )
        assert found == expected


@pytest.mark.parametrize(
    "layer",
    [Layer(window=5, softcap=2.0), Layer(sinks=True, window=6), Layer(slopes=True)],
    ids=str,
)
def test_same_answers(tmp_path: Path, layer: Layer) -> None:
    weight = np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    backbone = attention_backbone([layer, Layer()])
    source = write_toy(tmp_path / "a", weight, backbone=backbone, max_context=CONTEXT)
    bundle = _older(source.path, tmp_path / "b")
    report = bundle.manifest.provenance.stages[-1].report
    assert max(report["parity"]["hidden_states"].values()) < 1e-4


def test_refusals(
    tiny_bundle: Path, older: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=r"1\.30 for ort-cpu; --target ort-cuda was given"):
        find_target("ort-cuda", "1.30")
    words = ["lower", str(tiny_bundle), "-o", str(tmp_path / "b"), "--target", "ort-cpu"]
    assert main([*words, "--onnxruntime-at-least", "1.28"]) == 2
    assert "--onnxruntime-at-least 1.28" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    model = attention_backbone([Layer()])
    model.graph.append(
        ir.node("MixtureOfExperts_swiglu", [model.graph.inputs[0]], domain="headport")
    )
    with pytest.raises(LoweringError, match=r"on ONNX Runtime 1\.30; lower it for 1\.32"):
        for rewrite in find_target("ort-cpu", "1.30").passes(model, CONTEXT):
            rewrite(model)
    [fault] = faults(older.manifest, {}, [RUNTIMES["genai"]])
    assert "lowered for ONNX Runtime 1.30" in fault


def test_the_command_says_what_is_unproved(tiny_bundle: Path, tmp_path: Path) -> None:
    options = Options(
        bundle=tiny_bundle,
        output=tmp_path / "b",
        target="ort-cpu",
        onnxruntime_at_least="1.30",
    )
    assert "unproved on ONNX Runtime 1.30 until it has run there" in run(options).text
