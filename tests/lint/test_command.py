from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.cli import main
from headport.errors import LoweringError, UsageError
from headport.graphs import load_graphs
from headport.lint.command import Options, lint, run
from headport.lint.findings import Subject
from headport.lint.rules import BUNDLE_RULES, lint_bundle
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.quantize.command import Options as QuantizeOptions
from headport.quantize.command import quantize
from tests.lowering.backbones import CONTEXT, HIDDEN, VOCAB, Layer, attention_backbone
from tests.toy_bundles import lookup_backbone, write_toy


def toy(folder: Path, *, half: bool = False, attention: bool = True, **changes: Any) -> Bundle:
    kind = np.float16 if half else np.float32
    weight = np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)).astype(kind)
    if not attention:
        return write_toy(folder, weight, backbone=lookup_backbone(weight[::-1].copy()), **changes)
    backbone = attention_backbone([Layer(softcap=2.0), Layer()], half=half)
    return write_toy(folder, weight, backbone=backbone, max_context=CONTEXT, **changes)


def rules(source: Bundle, target: str, **changes: Any) -> set[str]:
    return {found.rule for found in lint(Options(bundle=source.path, target=target, **changes))}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("target", ["tensorrt", "ort-cpu"])
def test_what_headport_writes_is_clean(tmp_path: Path, half: bool, target: str) -> None:
    source = toy(tmp_path / "a", half=half)
    found = lint(Options(bundle=source.path, target=target))
    assert not [finding for finding in found if finding.severity == "error"]
    lowered = lower(LowerOptions(bundle=source.path, output=tmp_path / "b", target=target))
    again = lint(Options(bundle=lowered.path, target=target))
    assert not [finding for finding in again if finding.severity == "error"]


def test_a_bundle_of_another_target_is_refused(tmp_path: Path) -> None:
    source = toy(tmp_path / "a")
    lowered = lower(LowerOptions(bundle=source.path, output=tmp_path / "b", target="ort-cpu"))
    with pytest.raises(LoweringError, match="lowered to ort-cpu"):
        lint(Options(bundle=lowered.path, target="tensorrt"))
    with pytest.raises(UsageError, match="--calibration needs --target tensorrt"):
        lint(Options(bundle=source.path, target="ort-cpu", calibration=(tmp_path / "x",)))
    with pytest.raises(UsageError, match="--calibration-tokens: at least 1"):
        lint(Options(bundle=source.path, target="tensorrt", calibration_tokens=0))


def test_a_head_that_is_widened_is_a_warning(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(101, 48)).astype(np.float32)
    source = write_toy(tmp_path / "a", weight)
    half = quantize(QuantizeOptions(bundle=source.path, output=tmp_path / "b", head="fp16"))
    outcome = run(Options(bundle=half.path, target="tensorrt"))
    assert outcome.exit_code == 0
    assert "widened-weight" in outcome.text and "--dtype fp16" in outcome.text


def test_two_forms_of_one_matrix_are_found(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(101, 48)).astype(np.float32)
    tied = write_toy(tmp_path / "tied", weight, tied=True)
    assert "two-copies" not in rules(tied, "ort-cpu")
    for number, options in enumerate(({"head": "int8"}, {"head": "int4"}, {"head": "int8-row"})):
        output = tmp_path / f"q{number}"
        source = quantize(QuantizeOptions(bundle=tied.path, output=output, **options))
        assert "two-copies" in rules(source, "ort-cpu")
    untied = write_toy(tmp_path / "untied", weight)
    other = quantize(QuantizeOptions(bundle=untied.path, output=tmp_path / "r", head="int8"))
    assert "two-copies" not in rules(other, "ort-cpu")


def changed(source: Bundle, **changes: Any) -> Subject:
    manifest = msgspec.structs.replace(source.manifest, **changes)
    return Subject(Bundle(source.path, manifest), manifest, load_graphs(source))


def named(subject: Subject, target: str) -> dict[str, str]:
    return {found.rule: found.found for found in lint_bundle(subject, target)}


def test_a_missing_session_option_is_an_error(tmp_path: Path) -> None:
    source = toy(tmp_path / "a", attention=False)
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 23]> g (float[2,8] x, int8[8,4] q, float s) '
        "=> (float[2,4] y) {w = DequantizeLinear (q, s) y = MatMul (x, w)}"
    )
    subject = changed(source, session_options={})
    subject.models["head.lm"] = model
    assert "accuracy_level not set" in named(subject, "ort-cpu")["silent-rounding"]
    assert "silent-rounding" not in named(subject, "tensorrt")
    kept = changed(source)
    kept.models["head.lm"] = model
    assert "silent-rounding" not in named(kept, "ort-cpu")


def test_rounding_that_was_not_asked_for_is_an_error(tmp_path: Path) -> None:
    source = toy(tmp_path / "a", attention=False)
    options = {"head": "int8", "block": 16, "activations": "rounded"}
    rounded = quantize(QuantizeOptions(bundle=source.path, output=tmp_path / "q", **options))
    lowered = lower(LowerOptions(bundle=rounded.path, output=tmp_path / "b", target="ort-cpu"))
    assert "unasked-rounding" not in named(changed(lowered), "ort-cpu")
    head = lowered.manifest.heads["lm"]
    exact = msgspec.structs.replace(head.quantization, activations="exact")
    heads = {"lm": msgspec.structs.replace(head, quantization=exact)}
    assert "accuracy_level 4" in named(changed(lowered, heads=heads), "ort-cpu")["unasked-rounding"]


def test_a_head_left_out_is_a_warning(tmp_path: Path) -> None:
    from headport.manifest import BackboneQuantization, StoredMatrix

    source = toy(tmp_path / "a")
    record = BackboneQuantization(
        matrices={"w": StoredMatrix(format="int8", block=64)}, embedding={}, activations="exact"
    )
    found = named(changed(source, backbone_quantization=record), "ort-cpu")
    assert "the head lm is not" in found["head-left-out"]
    assert "head-left-out" not in named(changed(source), "ort-cpu")


def test_float16_on_a_cpu_is_a_warning(tmp_path: Path) -> None:
    assert "float-detours" in named(changed(toy(tmp_path / "a", half=True)), "ort-cpu")
    assert "float-detours" not in named(changed(toy(tmp_path / "b")), "ort-cpu")


def test_stale_and_orphaned_data_are_found(tmp_path: Path) -> None:
    source = toy(tmp_path / "a")
    assert not {"stale-data", "orphan-bytes"} & named(changed(source), "ort-cpu").keys()
    moved = tuple(msgspec.structs.replace(t, offset=t.offset + 64) for t in source.manifest.tensors)
    assert "the ledger says" in named(changed(source, tensors=moved), "tensorrt")["stale-data"]
    name = source.manifest.tensors[0].file
    grown = msgspec.structs.replace(source.manifest.files[name], bytes=1 << 20)
    files = {**source.manifest.files, name: grown}
    assert "belong to no tensor" in named(changed(source, files=files), "tensorrt")["orphan-bytes"]


def test_every_bundle_rule_is_tried_above() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{rule.name}"' in text for rule in BUNDLE_RULES)


def test_values_beyond_half_precision_are_found_on_texts(tiny_bundle: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    found = lint(Options(bundle=tiny_bundle, target="tensorrt", calibration=(text,)))
    assert "overflowing-value" not in {finding.rule for finding in found}
    from headport.lint import ranges

    bundle = Bundle.open(tiny_bundle)
    model = ir.load(tiny_bundle / "backbone.onnx")
    name = next(n for n in model.graph.initializers if n.endswith("embed_tokens.weight"))
    value = model.graph.initializers[name]
    value.const_value = ir.tensor(value.const_value.numpy() * 1e6, name=name)
    [worst, *_] = ranges.find_overflows(bundle, "backbone", model, (text,), 64)
    assert worst.rule == "overflowing-value" and worst.severity == "warning"
    assert "reaches" in worst.found and "--dtype fp32" in worst.cure


def test_a_text_that_cannot_be_read_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    for name, data in (("absent", None), ("empty", b""), ("binary", b"\xff\xfe")):
        file = tmp_path / name
        if data is not None:
            file.write_bytes(data)
        with pytest.raises(UsageError, match=r"a (UTF-8 )?text was expected"):
            lint(Options(bundle=tiny_bundle, target="tensorrt", calibration=(file,)))


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = toy(tmp_path / "a")
    assert main(["lint", str(source.path), "--target", "tensorrt"]) == 0
    assert "0 errors" in capsys.readouterr().out
