"""`headport merge` from options to files: names, bytes, refusals, nothing half-written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.cli import main
from headport.errors import MergeError, OutputError, ParityError
from headport.merge import Options, merge
from headport.merge import command as command_module
from headport.session import open_session


def digests(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
    }


def test_ports_and_files(tiny_bundle: Path, tmp_path: Path) -> None:
    before = digests(tiny_bundle)
    report = merge(Options(bundle=tiny_bundle, output=tmp_path / "m"))
    assert report.parity and not report.position_ids and report.head == "head.lm"
    assert digests(tiny_bundle) == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    file = tmp_path / "m" / "model.onnx"
    onnx.checker.check_model(str(file), full_check=True)
    session = open_session(file, {})
    caches = [f"{n}.{kind}" for n in (0, 1) for kind in ("key", "value")]
    past = [f"past_key_values.{name}" for name in caches]
    assert session.inputs == ("input_ids", "attention_mask", *past)
    assert session.outputs == ("logits", *(f"present.{name}" for name in caches))
    assert session.dtype("logits") == np.float32
    record = json.loads((tmp_path / "m" / "merge.json").read_text())
    found = digests(tmp_path / "m")
    del found["merge.json"]
    assert {n: f["sha256"] for n, f in record["files"].items()} == found
    assert record["for"] == ["genai", "optimum"]
    assert record["session_options"] == Bundle.open(tiny_bundle).manifest.session_options
    assert {"LICENSE", "tokenizer.json", "config.json", "genai_config.json"} <= set(found)
    tokenizer = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert report.changed_files == ("tokenizer_config.json",)
    described = onnx.load(str(file), load_external_data=False).metadata_props
    assert {p.key for p in described} >= {"headport.checkpoint", "headport.session_options"}


def test_the_same_bundle_gives_the_same_bytes(tiny_bundle: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        merge(Options(bundle=tiny_bundle, output=tmp_path / name))
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_a_tied_weight_is_one_initialiser(tied_bundle: Path, tmp_path: Path) -> None:
    report = merge(Options(bundle=tied_bundle, output=tmp_path / "m"))
    tensors = Bundle.open(tied_bundle).manifest.tensors
    assert report.initializers_shared >= 1
    # Page by page, so at most a page of padding for each tensor.
    stored = sum(tensor.length for tensor in tensors)
    assert stored <= report.data_bytes <= stored + 4096 * len(tensors)
    initializers = ir.load(tmp_path / "m" / "model.onnx").graph.initializers
    wide = [v.name for v in initializers.values() if list(v.shape or ()) == [257, 64]]
    assert wide == ["model.embed_tokens.weight"]


def test_an_optimum_folder_has_no_genai_config(tiny_bundle: Path, tmp_path: Path) -> None:
    report = merge(Options(bundle=tiny_bundle, output=tmp_path / "m", runtime="optimum"))
    assert report.position_ids and not (tmp_path / "m" / "genai_config.json").exists()
    session = open_session(tmp_path / "m" / "model.onnx", {})
    assert session.inputs[:3] == ("input_ids", "attention_mask", "position_ids")


def test_a_certified_head_is_merged_by_its_full_graph(
    certified_bundle: Path, tied_bundle: Path, tmp_path: Path
) -> None:
    report = merge(Options(bundle=certified_bundle, output=tmp_path / "m"))
    candidates = Bundle.open(certified_bundle).manifest.heads["lm"].candidates
    assert candidates is not None and report.head == candidates.full
    # Nothing of the quantised weight goes along: the file is that of the bundle it was made from.
    plain = merge(Options(bundle=tied_bundle, output=tmp_path / "plain"))
    assert report.data_bytes == plain.data_bytes


def test_an_int8_head_keeps_its_form(int8_bundle: Path, int8_lowered: Path, tmp_path: Path) -> None:
    merge(Options(bundle=int8_bundle, output=tmp_path / "portable"))
    ops = {n.op_type for n in ir.load(tmp_path / "portable" / "model.onnx").graph}
    assert {"DequantizeLinear", "Gemm"} <= ops and "MatMulNBits" not in ops
    merge(Options(bundle=int8_lowered, output=tmp_path / "cpu", runtime="genai"))
    model = ir.load(tmp_path / "cpu" / "model.onnx")
    ops = {n.op_type for n in model.graph}
    assert {"MatMulNBits", "GroupQueryAttention"} <= ops
    names = [value.name for value in model.graph.inputs]
    assert names[:2] == ["input_ids", "attention_mask"] and "seqlens_k" not in names


def test_what_merged_graphs_cannot_be_told_is_said(
    conditioned_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", str(conditioned_bundle), "-o", str(tmp_path / "m")]) == 0
    assert "they answer as it does without one" in capsys.readouterr().out


def test_refusals_name_the_fault(
    gemma2_bundle: Path, tiny_lowered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MergeError, match="type 'gemma2' caches of 4 heads × 16"):
        merge(Options(bundle=gemma2_bundle, output=tmp_path / "m"))
    assert main(["merge", str(tiny_lowered), "-o", str(tmp_path / "m"), "--for", "optimum"]) == 2
    assert "lowered to ort-cpu" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_outputs_that_are_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="lies in the bundle"):
        merge(Options(bundle=tiny_bundle, output=tiny_bundle / "m"))
    with pytest.raises(OutputError, match="lies in the bundle"):
        merge(Options(bundle=tiny_bundle, output=tiny_bundle, force=True))
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("not made by merge")
    with pytest.raises(OutputError, match="exists"):
        merge(Options(bundle=tiny_bundle, output=other))
    with pytest.raises(OutputError, match=r"not a folder with a merge\.json"):
        merge(Options(bundle=tiny_bundle, output=other, force=True))
    assert (other / "mine.txt").read_text() == "not made by merge"


def test_force_replaces_what_merge_wrote(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["merge", str(tiny_bundle), "-o", str(tmp_path / "m")]
    assert main(line) == 0
    said = capsys.readouterr().out
    assert "one graph for onnxruntime-genai and Optimum" in said
    assert "ONNX Runtime's defaults: max |Δlogit|" in said
    (tmp_path / "m" / "left over.txt").write_text("of the last time")
    assert main([*line, "--force", "--for", "genai", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["runtimes"] == ["genai"] and document["parity"]["positions"] > 100
    assert not (tmp_path / "m" / "left over.txt").exists()


def test_a_file_that_answers_otherwise_is_not_written(
    tiny_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store_once = command_module.store_once

    def halve_the_head(model: ir.Model) -> int:
        value = model.graph.initializers["lm_head.weight"]
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy() * np.float32(0.5), name=value.name)
        return store_once(model)

    monkeypatch.setattr(command_module, "store_once", halve_the_head)
    line = ["merge", str(tiny_bundle), "-o", str(tmp_path / "m")]
    assert main(line) == 1
    assert "does not answer like the bundle" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_default_options_change_is_not_written_for_optimum(
    int8_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.merge.layouts import use_fusible_layout

    save = command_module._save

    def save_fusible(model: ir.Model, folder: Path) -> None:
        save(model, folder)
        use_fusible_layout(folder / "model.onnx")

    monkeypatch.setattr(command_module, "_save", save_fusible)
    with pytest.raises(ParityError, match="default session options, which Optimum uses"):
        merge(Options(bundle=int8_bundle, output=tmp_path / "m"))
    assert list(tmp_path.iterdir()) == []
    report = merge(Options(bundle=int8_bundle, output=tmp_path / "m", runtime="genai"))
    assert report.parity.default_options.max_abs_logit_error > 1e-2
