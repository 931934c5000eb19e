"""`headport engine` with a stand-in for the library: everything but the library itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.cli import main
from headport.engines import bundle_digest, read_engines
from headport.errors import EngineError, LoweringError, OutputError, ParityError, UsageError
from headport.inspection import Options as InspectOptions
from headport.inspection import run as inspect
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.quantize.command import Options as QuantizeOptions
from headport.quantize.command import quantize
from headport.recipe import read_recipe
from headport.runtime.engine.command import Options, engine, run
from headport.runtime.engine.profiles import parse_profiles
from tests.lowering.backbones import CONTEXT, HIDDEN, VOCAB, Layer, attention_backbone
from tests.toy_bundles import write_toy

PROFILE = ("batch=1:2:4", "sequence=1:4:16", "past=0:8:31")


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    weight = np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)).astype(np.float16)
    backbone = attention_backbone([Layer()], half=True)
    source = write_toy(folder / "a", weight, backbone=backbone, max_context=CONTEXT)
    options = QuantizeOptions(bundle=source.path, output=folder / "int8", head="int8-row")
    return quantize(options).path


@pytest.fixture(scope="module")
def lowered(portable: Path) -> Path:
    output = portable.with_name("lowered")
    return lower(LowerOptions(bundle=portable, output=output, target="tensorrt")).path


def options_for(source: Path, output: Path, backend: str, **changes: Any) -> Options:
    chosen = {"bundle": source, "output": output, "backend": backend, "profile": PROFILE}
    return Options(**(chosen | changes))


def test_plans_and_records_of_every_graph(
    lowered: Path, tmp_path: Path, separate_backend: str
) -> None:
    chosen = options_for(
        lowered,
        tmp_path / "out",
        separate_backend,
        compute_capability=("SM86", "SM89"),
        workspace=256,
        weight_streaming=True,
    )
    bundle = engine(chosen)
    assert Bundle.open(bundle.path).manifest == bundle.manifest
    records = read_engines(bundle)
    assert set(records) == {"backbone", "head.lm"}
    record = records["head.lm"]
    assert record.status == "built"
    assert record.plan_sha256 == bundle.manifest.files["engines/head.lm.plan"].sha256
    assert record.bundle_sha256 == bundle_digest(Bundle.open(lowered).manifest)
    assert (record.backend, record.backend_version) == ("tensorrt-rtx", "1.7.1")
    assert record.compute_capabilities == ("SM86", "SM89")
    assert record.flags == ("WEIGHT_STREAMING",)  # and TF32 is off
    assert record.workspace_bytes == 256 << 20
    [weight] = record.weights
    assert (weight.dtype, weight.found, weight.elements) == ("int8", True, VOCAB * HIDDEN)
    assert weight.plan_bytes_per_element == record.plan_bytes / (VOCAB * HIDDEN)
    assert record.profiles[0].shapes["hidden_states"] == ((1, HIDDEN), (2, HIDDEN), (4, HIDDEN))
    assert records["backbone"].profiles[0].shapes["attention_mask"] == ((1, 1), (2, 12), (4, 47))
    assert records["backbone"].layers["ATTENTION"] == 1
    assert "INFO: built" in record.log
    head = (bundle.path / "engines/head.lm.plan").read_bytes().split(b"\n", 1)[0]
    assert json.loads(head)["targets"] == ["SM86", "SM89"]
    stage = bundle.manifest.provenance.stages[-1]
    assert (stage.stage, stage.report["status"]) == ("engine", "built")


def test_a_portable_bundle_is_lowered_first(
    portable: Path, tmp_path: Path, fake_backend: str
) -> None:
    bundle = engine(options_for(portable, tmp_path / "out", fake_backend, top_k=3))
    assert bundle.manifest.target == "tensorrt"
    names = [stage.stage for stage in bundle.manifest.provenance.stages]
    assert names[-2:] == ["lower", "engine"]
    outputs = [port.name for port in read_engines(bundle)["head.lm"].outputs]
    assert outputs == ["logits", "top_logits", "top_ids", "logsumexp"]


def test_one_merged_plan_also_gives_hidden_states(
    lowered: Path, tmp_path: Path, fake_backend: str
) -> None:
    bundle = engine(options_for(lowered, tmp_path / "out", fake_backend, merged=True))
    [record] = read_engines(bundle).values()
    outputs = [port.name for port in record.outputs]
    assert outputs[0] == "logits" and outputs[-1] == "hidden_states"
    assert record.plan == "engines/merged.plan"
    assert record.weights[0].found


def test_two_builds_give_the_same_plan(lowered: Path, tmp_path: Path, fake_backend: str) -> None:
    chosen = options_for(lowered, tmp_path / "out", fake_backend, merged=True)
    first = read_engines(engine(chosen))["merged"].layers
    again = read_engines(engine(options_for(lowered, tmp_path / "b", fake_backend, merged=True)))
    assert first == again["merged"].layers


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("parser", r"Frobnicate node_7: no kernel \[UNSUPPORTED_NODE\]"),
        ("builder", "no implementation of node_7"),
        ("unused", "the builder warns: Unused Input: lengths"),
        ("empty", r"the network of .*onnx is empty"),
        ("static", r"input hidden_states became \[8, 24\]"),
        ("profile", "the profile 'default' is refused"),
    ],
)
def test_what_the_library_says_is_passed_on_and_nothing_is_written(
    lowered: Path,
    tmp_path: Path,
    fake_backend: str,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    message: str,
) -> None:
    monkeypatch.setenv("HEADPORT_FAKE", fault)
    with pytest.raises(EngineError, match=message):
        engine(options_for(lowered, tmp_path / "out", fake_backend))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fault", "changes", "message"),
    [
        ("hang", {"timeout": 2}, "took more than 2 s"),
        ("memory", {"memory": 200}, r"MiB of memory, 200 are allowed"),
        ("abort", {}, "ended by signal SIGABRT"),
    ],
)
def test_a_build_has_bounds(
    lowered: Path,
    tmp_path: Path,
    separate_backend: str,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setenv("HEADPORT_FAKE", fault)
    with pytest.raises(EngineError, match=message):
        engine(options_for(lowered, tmp_path / "out", separate_backend, merged=True, **changes))


def test_integers_that_were_widened_fail_the_build(
    lowered: Path, tmp_path: Path, fake_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADPORT_FAKE", "widen")
    with pytest.raises(ParityError, match=r"int8 weight w.int8 .* 1.000 expected.*widened"):
        engine(options_for(lowered, tmp_path / "out", fake_backend))
    assert not (tmp_path / "out").exists()


def test_options_a_backend_lacks_are_refused_by_name(
    lowered: Path, tmp_path: Path, fake_backend: str
) -> None:
    for changes, names in (
        ({"version_compatible": True}, "--version-compatible"),
        ({"compute_capability": ("SM90", "SM86")}, "--compute-capability SM90.*SM86, SM89, SM120"),
        ({"timeout": 0}, "--timeout: at least 1"),
        ({"workspace": 0}, "--workspace: at least 1"),
        ({"profile": ("batch=1",)}, "lacks sequence, past"),
        ({"top_k": 4}, "--top-k: the bundle is lowered already"),
    ):
        with pytest.raises(UsageError, match=names):
            engine(options_for(lowered, tmp_path / "out", fake_backend, **changes))


def test_an_absent_library_is_named_with_its_package(
    lowered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(UsageError, match=r"pip install 'headport\[tensorrt-rtx\]'"):
        engine(options_for(lowered, tmp_path / "out", "tensorrt-rtx"))


def test_other_targets_and_outputs_are_refused(
    portable: Path, lowered: Path, tmp_path: Path, fake_backend: str
) -> None:
    other = lower(LowerOptions(bundle=portable, output=tmp_path / "cpu", target="ort-cpu"))
    with pytest.raises(LoweringError, match="lowered to ort-cpu"):
        engine(options_for(other.path, tmp_path / "out", fake_backend))
    with pytest.raises(OutputError, match="exists"):
        engine(options_for(lowered, other.path, fake_backend))
    with pytest.raises(OutputError, match="choose another"):
        engine(options_for(lowered, lowered / "in", fake_backend))


def test_a_timing_cache_is_kept_and_garbage_is_measured_anew(
    lowered: Path, tmp_path: Path, fake_backend: str
) -> None:
    for held in (None, b"garbage", b"timings"):
        cache = tmp_path / f"cache-{held}"
        if held is not None:
            cache.write_bytes(held)
        engine(options_for(lowered, tmp_path / f"out-{held}", fake_backend, timing_cache=cache))
        assert cache.read_bytes() == b"timings"


def test_inspect_shows_the_chain_and_says_built(
    lowered: Path, tmp_path: Path, fake_backend: str
) -> None:
    bundle = engine(options_for(lowered, tmp_path / "out", fake_backend))
    outcome = inspect(InspectOptions(bundle=bundle.path))
    record = read_engines(bundle)["head.lm"]
    assert outcome.exit_code == 0
    for text in (
        "built, not validated, by tensorrt-rtx 1.7.1",
        f"→ head.lm ONNX {record.graph_sha256[:16]}… → plan {record.plan_sha256[:16]}…",
        "bytes per weight of w.int8 (its bytes found)",
        "not on this machine: tensorrt-rtx is not installed here",
    ):
        assert text in outcome.text
    assert "validated" not in outcome.text.replace("not validated", "")


def test_inspect_names_what_does_not_belong_together(
    portable: Path, lowered: Path, tmp_path: Path, fake_backend: str
) -> None:
    bundle = engine(options_for(lowered, tmp_path / "out", fake_backend))
    plan = bundle.path / "engines/head.lm.plan"
    plan.write_bytes(plan.read_bytes()[:-1])
    assert main(["inspect", str(bundle.path)]) == 2
    from headport.errors import BundleError

    with pytest.raises(BundleError, match=r"head.lm.plan: changed.*headport engine lowered -o out"):
        inspect(InspectOptions(bundle=bundle.path))


def test_a_recipe_goes_from_a_checkpoint_to_plans(
    tiny_llama: Path, tmp_path: Path, fake_backend: str
) -> None:
    recipe, output = tmp_path / "r.toml", tmp_path / "out"
    stages = "[export]\ndtype = 'fp16'\n[quantize]\nhead = 'int8-row'\n[engine]\n"
    recipe.write_text(f"{stages}backend = '{fake_backend}'\nprofile = {list(PROFILE)}\n")
    line = ["build", str(tiny_llama), "--recipe", str(recipe), "-o", str(output), "--quiet"]
    assert main(line) == 0
    bundle = Bundle.open(output)
    names = [stage.stage for stage in bundle.manifest.provenance.stages]
    assert names == ["export", "quantize", "lower", "engine"]
    records = read_engines(bundle)
    assert {record.status for record in records.values()} == {"built"}
    # What the plans were built of was removed; the command names what is still there.
    again = f"headport engine out -o out.again --backend {fake_backend} --profile"
    assert all(record.command.startswith(again) for record in records.values())
    engine(options_for(output, tmp_path / "out.again", fake_backend))


def test_a_recipe_is_refused_before_its_first_stage(
    tiny_llama: Path, tmp_path: Path, fake_backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.toml"
    line = ["build", str(tiny_llama), "--recipe", str(recipe), "-o", str(tmp_path / "out")]
    for keys, words in (
        ("compute_capability = ['SM90']", "SM90: tensorrt-rtx 1.7.1 builds for"),
        ("timing_cache = 'x'", "timing_cache belongs on the command line"),
    ):
        recipe.write_text(f"[engine]\nbackend = '{fake_backend}'\n{keys}\n")
        assert main(line) == 2
        assert words in capsys.readouterr().err


def test_the_recipe_we_ship_is_valid(fake_backend: str) -> None:
    root = Path(__file__).resolve().parents[3]
    recipe = read_recipe(root / "examples" / "recipes" / "tensorrt.toml")
    assert [stage.name for stage in recipe.stages] == ["export", "quantize", "engine"]
    parse_profiles(recipe.sections["engine"]["profile"], 8192)


def test_the_command_tells_what_it_built(lowered: Path, tmp_path: Path, fake_backend: str) -> None:
    outcome = run(options_for(lowered, tmp_path / "out", fake_backend))
    assert "2 plans built, none validated" in outcome.text
    assert "its bytes found in it" in outcome.text
    assert outcome.document["plans"][0]["sha256"]
