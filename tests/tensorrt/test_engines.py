"""Tiny models as real plans: every format of the head, full and cut, and the whole decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headport.bundle import Bundle
from headport.cli import main
from headport.engines import EngineRecord, read_engines
from headport.errors import EngineError, NoGpuError, UsageError
from headport.gpu_probe import probe_gpu
from headport.lint.command import Options as LintOptions
from headport.lint.command import lint
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.quantize.command import Options as QuantizeOptions
from headport.quantize.command import quantize
from headport.runtime.engine.command import Options, engine
from headport.selftest import run_selftest
from tests.conftest import TEXTS
from tests.tensorrt.bundles import cut_head, differing_share

PROFILE = ("batch=1:2:4", "sequence=1:8:32", "past=0:8:32")
FORMATS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "int8-row": {"head": "int8-row"},
    "int8": {"head": "int8", "block": 64},
    "w8a8": {"head": "int8-row", "activations": "static"},
    "int4": {"head": "int4", "block": 32, "positive_scales": True},
}


def quantised(source: Bundle, folder: Path, name: str) -> Bundle:
    options = FORMATS[name]
    if not options:
        return source
    if name == "w8a8":
        text = folder / "text.txt"
        text.write_text("\n".join(TEXTS * 8))
        options = {**options, "calibration": (text,)}
    return quantize(QuantizeOptions(bundle=source.path, output=folder / name, **options))


def built(source: Path, output: Path, **changes: Any) -> Bundle:
    chosen = {"bundle": source, "output": output, "backend": "tensorrt-rtx", "profile": PROFILE}
    return engine(Options(**(chosen | {"compute_capability": ("SM89",)} | changes)))


@pytest.mark.parametrize("cut", [False, True], ids=["full", "pruned"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_becomes_plans(
    half_bundle: Path, tmp_path: Path, name: str, cut: bool
) -> None:
    source = Bundle.open(half_bundle)
    if cut:
        source = cut_head(source, tmp_path / "cut", np.arange(0, 257, 2))
    source = quantised(source, tmp_path, name)
    lowered = lower(
        LowerOptions(bundle=source.path, output=tmp_path / "low", target="tensorrt", top_k=7)
    )
    assert run_selftest(lowered)
    found = lint(LintOptions(bundle=lowered.path, target="tensorrt"))
    assert not [finding for finding in found if finding.severity == "error"]
    bundle = built(lowered.path, tmp_path / "out")
    records = read_engines(bundle)
    assert {record.status for record in records.values()} == {"built"}
    assert records["backbone"].layers["ATTENTION_INPUT"] == 2
    [weight] = records["head.lm"].weights
    assert weight.found
    assert [port.name for port in records["head.lm"].outputs] == [
        *("logits", "top_logits", "top_ids", "logsumexp")
    ]
    inputs = {port.name: port.shape for port in records["backbone"].inputs}
    assert inputs["past_key_values.0.key"] == (-1, 2, -1, 32)


def test_one_command_from_a_checkpoint_and_what_it_builds_of_is_validated(
    wide_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, output, text = (tmp_path / name for name in ("r.toml", "out", "text.txt"))
    recipe.write_text(
        "[export]\ndtype = 'fp16'\n[quantize]\nhead = 'int8-row'\n[engine]\n"
        f"backend = 'tensorrt-rtx'\ncompute_capability = ['SM89']\nprofile = {list(PROFILE)}\n"
    )
    line = ["build", str(wide_checkpoint), "--recipe", str(recipe), "-o", str(output), "--quiet"]
    assert main(line) == 0
    text.write_text("\n\n".join(TEXTS * 6))
    gates, report = tmp_path / "gates.toml", tmp_path / "report.json"
    gates.write_text('[[gate]]\nmetric = "kl_mean"\nmax = 1e-3\n')
    line = ["validate", str(output), "--reference", str(wide_checkpoint), "--text", str(text)]
    assert main([*line, "--gates", str(gates), "--json", str(report)]) == 0, capsys.readouterr()
    assert json.loads(report.read_text())["verdict"] == "passed"
    # That the graphs are right does not make the plans more than built.
    assert {record.status for record in read_engines(Bundle.open(output)).values()} == {"built"}
    assert main(["inspect", str(output)]) == 0
    assert "built, not validated, by tensorrt-rtx" in capsys.readouterr().out


def test_float32_and_fp8_build_as_well(tiny_bundle: Path, rtx: Any, tmp_path: Path) -> None:
    source = quantize(QuantizeOptions(bundle=tiny_bundle, output=tmp_path / "q", head="fp8"))
    bundle = built(source.path, tmp_path / "out")
    assert read_engines(bundle)["head.lm"].weights[0].found
    # FP8 needs a GPU that has it; the library says so for those that do not.
    with pytest.raises(EngineError, match="fp8"):
        built(source.path, tmp_path / "old", compute_capability=("SM86",))


def test_two_builds_are_the_same_plans_but_for_numbers_in_a_backbone(
    half_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first of them has to compile all modules.
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "compiled"))
    made = [built(half_bundle, tmp_path / name) for name in ("a", "another-name" * 3)]
    first, second = (read_engines(bundle) for bundle in made)
    assert first["head.lm"].plan_sha256 == second["head.lm"].plan_sha256
    # Of a decoder's plans a few numbers may differ, for reasons inside the library; nothing that is
    # known of them does.
    one, other = (_known(found["backbone"]) for found in (first, second))
    assert one == other and one.layers
    plans = [bundle.path / read_engines(bundle)["backbone"].plan for bundle in made]
    share = differing_share(*plans)
    print(f"the backbone's two plans differ in {share:.2g} of their bytes")
    assert share < 1e-3


def _known(record: EngineRecord) -> EngineRecord:
    """A record without what tells one run from another."""
    own = {"plan_sha256": "", "log": (), "seconds": 0.0, "peak_memory_bytes": None, "command": ""}
    return msgspec.structs.replace(record, **own)


def test_one_plan_of_the_whole_model(half_bundle: Path, tmp_path: Path) -> None:
    record = read_engines(built(half_bundle, tmp_path / "out", merged=True))["merged"]
    assert record.outputs[0].name == "logits"
    assert record.outputs[-1].name == "hidden_states"


def test_prompts_and_decoding_have_profiles_of_their_own(half_bundle: Path, tmp_path: Path) -> None:
    words = "prefill batch=1 sequence=1:16:64 past=0 decode batch=1:2:4 sequence=1 past=0:8:63"
    bundle = built(half_bundle, tmp_path / "out", profile=tuple(words.split()))
    record = read_engines(bundle)["backbone"]
    assert [profile.name for profile in record.profiles] == ["prefill", "decode"]


def test_integers_that_the_builder_widens_are_noticed(
    half_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnx_ir as ir

    from headport.errors import ParityError
    from headport.runtime.engine import plan as plan_module

    source = quantised(Bundle.open(half_bundle), tmp_path, "int8-row")
    low = lower(LowerOptions(bundle=source.path, output=tmp_path / "low", target="tensorrt"))
    right = plan_module.build_apart

    def widened(request: Any, *arguments: Any, **named: Any) -> Any:
        if request.model.endswith("head.lm.onnx"):  # the restored weight as a float16 constant
            model = ir.load(request.model)
            [restore] = [n for n in model.graph if n.op_type == "DequantizeLinear"]
            whole, steps = (value.const_value.numpy() for value in restore.inputs)
            half = (whole * steps[:, None]).astype(np.float16)
            value = ir.val("wide", const_value=ir.tensor(half, name="wide"))
            model.graph.register_initializer(value)
            cast = next(iter(restore.outputs[0].uses())).node
            cast.replace_input_with(0, value)
            ir.save(model, request.model)
        return right(request, *arguments, **named)

    monkeypatch.setattr(plan_module, "build_apart", widened)
    with pytest.raises(ParityError, match=r"[\d.]+ bytes per element, 1.000 expected"):
        built(low.path, tmp_path / "out", merged=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version_compatible": True}, "builds no plan.*lean"),
        ({"strip_weights": True}, "builds no plan"),
    ],
)
def test_what_cannot_be_done_here_says_why(
    half_bundle: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    if probe_gpu():
        pytest.skip("with a GPU it can")
    with pytest.raises(EngineError, match=message):
        built(half_bundle, tmp_path / "out", **changes)


def test_weight_streaming_workspace_and_timings(half_bundle: Path, tmp_path: Path) -> None:
    cache = tmp_path / "timings"
    bundle = built(
        half_bundle,
        tmp_path / "out",
        weight_streaming=True,
        workspace=256,
        timing_cache=cache,
        merged=True,
    )
    record = read_engines(bundle)["merged"]
    assert "WEIGHT_STREAMING" in record.flags and "TF32" not in record.flags


def test_a_generation_it_does_not_know_is_refused(half_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"SM90.*SM89"):
        built(half_bundle, tmp_path / "out", compute_capability=("SM90",))


def test_running_a_plan_without_a_gpu_is_a_clear_error(half_bundle: Path, tmp_path: Path) -> None:
    from headport.runtime.tensorrt.runner import open_plans

    if probe_gpu():
        pytest.skip("there is a GPU")
    bundle = built(half_bundle, tmp_path / "out")
    with pytest.raises(NoGpuError, match="no NVIDIA driver"):
        open_plans(bundle)
