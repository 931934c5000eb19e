"""`headport triton` from options to a repository."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from headport.bundle import Bundle, file_entry
from headport.cli import main
from headport.engines import FOLDER, EngineProfile, EngineRecord, bundle_digest
from headport.errors import OutputError, ParityError, UsageError
from headport.manifest import Port
from headport.runtime.triton import graph_models
from headport.runtime.triton.command import Options, triton
from headport.selftest import SelftestResult
from tests.toy_bundles import write_toy


def config(repository: Path, model: str) -> str:
    return (repository / model / "config.pbtxt").read_text()


def test_the_python_backend(tiny_lowered: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    written = triton(
        Options(bundle=tiny_lowered, output=repository, name="tiny", slots=5, environment="/venv")
    )
    assert written.models == ("tiny",) and written.streams
    assert Bundle.open(repository / "tiny" / "1" / "bundle").manifest.target == "ort-cpu"
    assert (repository / "tiny" / "1" / "model.py").read_text().count(
        "class TritonPythonModel"
    ) == 1
    text = config(repository, "tiny")
    for line in (
        'name: "tiny"',
        'backend: "python"',
        "max_batch_size: 0",
        "instance_group {\n  count: 1\n  kind: KIND_CPU\n}",
        "model_transaction_policy {\n  decoupled: true\n}",
        'parameters {\n  key: "EXECUTION_ENV_PATH"\n  value {\n    string_value: "/venv"\n  }\n}',
        'parameters {\n  key: "headport.slots"\n  value {\n    string_value: "5"\n  }\n}',
        'input {\n  name: "stream"\n  data_type: TYPE_BOOL\n  dims: [ 1 ]\n  optional: true\n}',
    ):
        assert line in text


def test_whole_replies(tiny_lowered: Path, tmp_path: Path) -> None:
    triton(Options(bundle=tiny_lowered, output=tmp_path / "r", whole_replies=True, instances=2))
    text = config(tmp_path / "r", tiny_lowered.name)
    assert "decoupled: false" in text and "count: 2" in text and '"stream"' not in text


def test_graphs_of_the_onnxruntime_backend(tiny_bundle: Path, tmp_path: Path) -> None:
    repository = tmp_path / "r"
    options = Options(
        bundle=tiny_bundle,
        output=repository,
        name="tiny",
        backend="onnxruntime",
        max_batch_size=4,
        queue_delay=50,
    )
    assert triton(options).models == ("tiny_backbone", "tiny_head_lm")
    text = config(repository, "tiny_backbone")
    assert 'default_model_filename: "backbone.onnx"' in text
    assert "max_batch_size: 4" in text and "max_queue_delay_microseconds: 50" in text
    key = '  name: "past_key_values.0.key"\n  data_type: TYPE_FP32\n  dims: [ 2, -1, 16 ]\n'
    assert key in text
    assert "dims: [ 257 ]" in config(repository, "tiny_head_lm")
    # Each loads where it lies, with nothing but what was copied.
    from headport.session import open_session

    for model, file in (("tiny_backbone", "backbone.onnx"), ("tiny_head_lm", "head.lm.onnx")):
        open_session(repository / model / "1" / file, {})
    copied = {p.name for p in (repository / "tiny_head_lm" / "1").rglob("*") if p.is_file()}
    assert "backbone.onnx" not in copied and "backbone.bin" not in copied


def test_graphs_that_answer_otherwise_are_refused(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tolerance = Bundle.open(tiny_bundle).manifest.selftest
    assert tolerance is not None
    seen = {}

    def moved(bundle: Bundle) -> SelftestResult:
        seen["options"] = bundle.manifest.session_options
        return SelftestResult(0.0, {"lm": 2 * tolerance.logits}, tolerance, {})

    monkeypatch.setattr(graph_models, "run_selftest", moved)
    with pytest.raises(ParityError, match=r"the bundle answers otherwise: .* nothing was written"):
        triton(Options(bundle=tiny_bundle, output=tmp_path / "r", backend="onnxruntime"))
    assert seen == {"options": {}} and not (tmp_path / "r").exists()


def plans(bundle: Path, output: Path, **changes: object) -> Path:
    """A copy of a bundle with a plan and its record, as `headport engine` would leave them."""
    import shutil

    shutil.copytree(bundle, output)
    opened = Bundle.open(output)
    manifest = opened.manifest
    (output / FOLDER).mkdir()
    plan = output / FOLDER / "backbone.plan"
    plan.write_bytes(b"plan")
    ids = Port(name="input_ids", dtype="int64", shape=(-1, -1))
    hidden = Port(name="hidden_states", dtype="float16", shape=(-1, -1, 64))
    shapes = {"input_ids": ((1, 1), (2, 8), (6, 32))}
    record = EngineRecord(
        schema_version=1,
        status="built",
        graph="backbone",
        plan=f"{FOLDER}/backbone.plan",
        plan_sha256=file_entry(plan).sha256,
        plan_bytes=4,
        bundle_sha256=bundle_digest(manifest),
        graph_sha256=manifest.files[manifest.graphs["backbone"].file].sha256,
        checkpoint_sha256="0",
        backend="tensorrt",
        backend_version="10.13.0",
        compute_capabilities=(),
        flags=(),
        workspace_bytes=None,
        profiles=(EngineProfile(name="a", shapes=shapes), EngineProfile(name="b", shapes=shapes)),
        inputs=(ids,),
        outputs=(hidden,),
        layers={},
        types={},
        weights=(),
        log=(),
        seconds=1.0,
        peak_memory_bytes=None,
        command="headport engine",
    )
    record = msgspec.structs.replace(record, **changes)
    (output / FOLDER / "backbone.json").write_bytes(msgspec.json.encode(record))
    names = ("backbone.plan", "backbone.json")
    files = {f"{FOLDER}/{name}": file_entry(output / FOLDER / name) for name in names}
    manifest = msgspec.structs.replace(manifest, files=manifest.files | files)
    (output / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return output


def test_plans_of_the_tensorrt_backend(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = plans(tiny_bundle, tmp_path / "plans")
    repository = tmp_path / "r"
    options = Options(
        bundle=bundle, output=repository, name="tiny", backend="tensorrt", gpus=(0, 1)
    )
    assert triton(options).models == ("tiny_backbone",)
    assert (repository / "tiny_backbone" / "1" / "model.plan").read_bytes() == b"plan"
    text = config(repository, "tiny_backbone")
    assert "max_batch_size: 6" in text  # not the 8 asked for: no profile takes them
    assert 'kind: KIND_GPU\n  gpus: [ 0, 1 ]\n  profile: [ "0", "1" ]' in text
    assert 'name: "hidden_states"\n  data_type: TYPE_FP16\n  dims: [ -1, 64 ]' in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "tensorrt-rtx"}, "built with tensorrt-rtx, Triton's backend is TensorRT"),
        ({"flags": ("STRIP_PLAN",)}, "holds no weights, and Triton puts none in"),
        ({"plan_sha256": "0" * 64}, "is another plan"),
    ],
)
def test_plans_that_triton_cannot_load(
    tiny_bundle: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    bundle = plans(tiny_bundle, tmp_path / "plans", **changes)
    with pytest.raises(UsageError, match=message):
        triton(Options(bundle=bundle, output=tmp_path / "r", backend="tensorrt"))


def test_bundles_for_another_backend(tiny_bundle: Path, tiny_lowered: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="carries no plans; build them with `headport engine"):
        triton(Options(bundle=tiny_bundle, output=tmp_path / "r", backend="tensorrt"))
    with pytest.raises(
        UsageError, match="is lowered to ort-cpu, whose caches are written in place"
    ):
        triton(Options(bundle=tiny_lowered, output=tmp_path / "r", backend="onnxruntime"))


def test_a_bundle_that_chooses_no_tokens(tmp_path: Path) -> None:
    bundle = write_toy(tmp_path / "toy", np.ones((7, 4), np.float32))
    manifest = bundle.manifest
    heads = {"score": manifest.heads["lm"]}
    other = Bundle(bundle.path, msgspec.structs.replace(manifest, heads=heads))
    (bundle.path / "manifest.json").write_bytes(msgspec.json.encode(other.manifest))
    with pytest.raises(UsageError, match=r"a head 'lm' .* found score; serve its graphs with"):
        triton(Options(bundle=bundle.path, output=tmp_path / "r"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"version": 0, "slots": -1}, "--version: at least 1 .* --slots: at least 0"),
        ({"timeout": 0.0}, "--timeout: above 0 expected, 0 given"),
        ({"max_batch_size": 4}, "--max-batch-size: no effect with --backend python"),
        (
            {"backend": "onnxruntime", "slots": 4, "whole_replies": True},
            "--slots, --whole-replies: no effect with --backend onnxruntime",
        ),
        ({"gpus": (1,)}, "--gpus 1: headport runs on the first GPU"),
        ({"name": "a/b"}, "--name 'a/b': letters, digits"),
    ],
)
def test_wrong_options(
    tiny_lowered: Path, tmp_path: Path, given: dict[str, object], message: str
) -> None:
    options = msgspec.convert(
        {"bundle": tiny_lowered, "output": tmp_path / "r", **given},
        Options,
        dec_hook=lambda kind, value: value,
    )
    with pytest.raises(UsageError, match=message):
        triton(options)
    assert not (tmp_path / "r").exists()


def test_a_repository_in_its_bundle(tiny_lowered: Path) -> None:
    with pytest.raises(OutputError, match="is, contains or lies in the input"):
        triton(Options(bundle=tiny_lowered, output=tiny_lowered / "r"))


def test_the_verb(tiny_lowered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = tmp_path / "r"
    words = ["triton", str(tiny_lowered), "-o", str(repository), "--name", "tiny"]
    assert main(words) == 0
    assert "tiny, version 1, python backend, streams tokens" in capsys.readouterr().out
    assert main(words) == 2
    assert "choose another --version or pass --force" in capsys.readouterr().err
    assert main([*words, "--version", "2"]) == 0
    assert sorted(p.name for p in (repository / "tiny").iterdir()) == ["1", "2", "config.pbtxt"]
