"""The verb from the command line: outputs, exit codes, and one clear line for wrong use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from headport.cli import main
from headport.errors import UsageError
from headport.validate.command import Options, validate_with
from tests.conftest import llama_config, save_model
from tests.validate.sabotage import flip_byte

Run = Callable[..., int]


@pytest.fixture
def run(tiny_bundle: Path, tiny_llama: Path, texts: tuple[Path, ...]) -> Run:
    def call(*more: object, bundle: Path = tiny_bundle, reference: Path = tiny_llama) -> int:
        given = [str(item) for item in more]
        if "--text" not in given:
            given += ["--text", *map(str, texts)]
        return main(["validate", str(bundle), "--reference", str(reference), *given])

    return call


def test_a_good_bundle_passes_and_all_reports_are_written(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {kind: tmp_path / f"report.{kind}" for kind in ("json", "md", "html")}
    code = run(
        *("--json", paths["json"], "--markdown", paths["md"], "--html", paths["html"]),
        *("--max-tokens", 60, "--greedy-tokens", 4, "--window", 32),
    )
    assert code == 0
    document = json.loads(paths["json"].read_text(encoding="utf-8"))
    schema = (files("headport.validate") / "report.schema.json").read_text(encoding="utf-8")
    jsonschema.validate(document, json.loads(schema))
    assert document["verdict"] == "passed" and document["tokens_scored"] == 60
    assert [part["name"] for part in document["slices"]] == ["prose", "code"]
    assert document["notes"] == []
    assert document["protocol"]["window"] == 32
    assert document["candidate"]["session_options"]
    assert document["reference"]["sha256"] == document["candidate"]["checkpoint_sha256"]
    assert capsys.readouterr().out.startswith("PASSED: llama")
    assert paths["md"].read_text(encoding="utf-8").startswith("# Validation: passed")
    assert "<!doctype html>" in paths["html"].read_text(encoding="utf-8")


def test_a_failed_gate_exits_1_and_still_reports(
    tmp_path: Path, texts: Any, tiny_bundle: Path, reference_of: Any, tiny_llama: Path
) -> None:
    gates = tmp_path / "strict.toml"
    gates.write_text(
        "[[gate]]\nmetric = 'perplexity_ratio'\nmax = 0.5\nslice = 'code'\nby = 'value'\n"
    )
    options = Options(
        bundle=tiny_bundle,
        reference=str(tiny_llama),
        text=texts,
        gates=gates,
        max_tokens=20,
        greedy_tokens=0,
    )
    report = validate_with(reference_of(tiny_llama), options)
    assert report.verdict == "failed" and report.gates_source == "strict.toml"
    assert [gate.slice for gate in report.gates] == ["code"]
    assert report.slices[0].greedy == ()


def test_midpoint_sampler_records_and_baseline_in_one_run(
    tmp_path: Path, texts: Any, tiny_bundle: Path, reference_of: Any, tiny_llama: Path
) -> None:
    chat = tmp_path / "chat.jsonl"
    lines = [
        {"prompt": "The head is ", "completion": "the last matrix.", "weight": 1 + i % 2}
        for i in range(6)
    ]
    chat.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    options = Options(
        bundle=tiny_bundle,
        reference=str(tiny_llama),
        text=(*texts, chat),
        greedy_tokens=0,
        attribution_tokens=60,
        noise_floor_tokens=30,
        overlap=3,
        window=32,
        sampler=True,
        bisect=True,
        unquantised=tiny_bundle,
        ignore_ids=(0,),
    )
    first = validate_with(reference_of(tiny_llama), options)
    assert first.verdict == "passed" and first.regressions == ()
    assert first.sampler is not None and first.sampler.verdict == "passed"
    assert first.attribution is not None and len(first.attribution.parts) == 4
    assert first.bisection is not None and first.bisection.first is None
    assert [stage.stage for stage in first.bisection.stages][1:3] == ["layer 0", "layer 1"]
    assert first.slices[2].documents == 6 and first.protocol.weights.startswith("by the weight")
    file = tmp_path / "first.json"
    file.write_bytes(msgspec.json.encode(first))
    again = msgspec.structs.replace(options, baseline=file)
    second = validate_with(reference_of(tiny_llama), again)
    assert {found.verdict for found in second.regressions} == {"passed"}
    assert second.verdict == "passed" and second.baseline == "first.json"
    with pytest.raises(UsageError, match="other overlap found"):
        validate_with(reference_of(tiny_llama), msgspec.structs.replace(again, overlap=0))


def test_another_checkpoint_is_noted(
    tmp_path: Path, texts: Any, tiny_bundle: Path, reference_of: Any
) -> None:
    other = save_model(tmp_path / "twin", llama_config(), seed=1)
    options = Options(
        bundle=tiny_bundle, reference=str(other), text=texts, max_tokens=20, greedy_tokens=8
    )
    report = validate_with(reference_of(other), options)
    assert report.verdict == "failed"
    assert "is not the checkpoint this bundle was exported from" in report.notes[0]
    assert report.slices[0].greedy[0].near_tie is False


def test_another_vocabulary_is_refused(
    tmp_path: Path, texts: Any, tiny_bundle: Path, reference_of: Any
) -> None:
    other = save_model(tmp_path / "wide", llama_config(vocab_size=300))
    options = Options(bundle=tiny_bundle, reference=str(other), text=texts)
    with pytest.raises(UsageError, match="gives 300 and the bundle 257"):
        validate_with(reference_of(other), options)


def refused(run: Run, capsys: pytest.CaptureFixture[str], *more: object, **paths: Path) -> str:
    assert run(*more, **paths) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, "one clear line"
    return lines[0]


def test_a_damaged_bundle_exits_2(
    run: Run, tmp_path: Path, tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "copy")
    flip_byte(tmp_path / "copy")
    assert "changed (its sha256" in refused(run, capsys, bundle=tmp_path / "copy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-tokens", "-1"), "--max-tokens: at least 0 expected"),
        (("--max-tokens", "1"), "leaves nothing for some of the 2 texts"),
        (("--window", "0"), "--window: at least 1 expected"),
        (("--batch-size", "0"), "--batch-size: at least 1 expected"),
        (("--greedy-tokens", "-3"), "--greedy-tokens: at least 0 expected"),
        (("--text", "none.txt"), "none.txt: a text file was expected"),
        (("--gates", "none.toml"), "none.toml: cannot be read"),
        (("--markdown", "same", "--html", "same"), "same was given 2 times"),
    ],
)
def test_wrong_use_exits_2(
    options: tuple[str, ...], message: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(run, capsys, *options)


def test_a_midpoint_must_be_what_was_quantised(
    run: Run, tmp_path: Path, tiny_bundle: Path, phi_bundle: Path, capsys: Any
) -> None:
    from headport.quantize.command import Options as Quantisation
    from headport.quantize.command import quantize

    small = quantize(Quantisation(bundle=tiny_bundle, output=tmp_path / "int8", head="int8"))
    line = refused(run, capsys, "--unquantised", small.path)
    assert "int8 holds quantised weights (lm)" in line
    assert "from another checkpoint" in refused(run, capsys, "--unquantised", phi_bundle)


def test_an_empty_text_exits_2(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    line = refused(run, capsys, "--text", tmp_path / "empty.txt")
    assert "empty.txt: a text to score was expected" in line


def test_a_missing_reference_exits_2_at_once(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nothing is there" in refused(run, capsys, reference=tmp_path / "none")


def test_existing_outputs_are_kept_without_force(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.md").write_text("precious")
    line = refused(run, capsys, "--markdown", tmp_path / "report.md")
    assert "pass --force" in line
    assert (tmp_path / "report.md").read_text() == "precious"
