"""Families are exported as they are, or refused by name.

`export` compares the written files with PyTorch before it says success; these tests look at what
was found and repeat the comparison on their own for one prompt.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

from benchmarks import families as table
from benchmarks.zoo import ZOO
from headport.bundle import Bundle
from headport.errors import HeadportError
from headport.export.command import Options, export
from headport.graphs import load_graphs, write_graphs
from headport.runner import open_runner
from tests.conftest import VOCAB_SIZE, save_model
from tests.export.conftest import FamilyBundle
from tests.export.families import FAMILIES, SMALL


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exported_as_it_is(family: str, family_bundle: FamilyBundle) -> None:
    expected = FAMILIES[family][2]
    checkpoint, bundle = family_bundle(family)
    head = bundle.manifest.heads["lm"]
    assert {name: getattr(head, name) for name in expected} == pytest.approx(expected)
    assert head.weight in {tensor.name for tensor in bundle.manifest.tensors}
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    ids = np.random.default_rng(11).integers(1, VOCAB_SIZE, (1, 20))
    with torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(ids)).logits[0].numpy()
    runner = open_runner(bundle)
    hidden = runner.forward(runner.new_cache(1, 20), ids, np.array([20]))
    found = runner.head(hidden[0]).logits
    assert found is not None
    np.testing.assert_allclose(found, wanted, atol=2e-4 * max(1.0, np.abs(wanted).max()))


def test_gemma2_in_half_precision_keeps_softcaps_and_windows(
    tiny_gemma2: Path, tmp_path: Path
) -> None:
    # Its norms apply a float32 weight to half-precision input, which fuses into an ill-typed node.
    bundle = export(Options(model=str(tiny_gemma2), output=tmp_path / "bundle", dtype="fp16"))
    manifest = bundle.manifest
    head = manifest.heads["lm"]
    assert (head.softcap, head.tied, manifest.model.dtype) == (1.0, True, "fp16")
    report = manifest.provenance.stages[0].report
    assert sorted(report["attention_windows"]) == [0, 8]
    assert report["tensor_bytes"] <= 1.02 * report["parameter_bytes"]
    assert {t.dtype for t in manifest.tensors if len(t.shape) == 2} == {"float16"}


# family → config class, settings, what the refusal says
REFUSED = {
    "xlnet": (
        "XLNetConfig",
        {"vocab_size": VOCAB_SIZE, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 48},
        "XLNetLMHeadModel is refused.*two streams",
    ),
    "llama4": ("Llama4TextConfig", SMALL, "Llama4ForCausalLM.*chunked"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    family: str, tmp_path: Path
) -> None:
    kind, settings, reason = REFUSED[family]
    checkpoint = save_model(tmp_path / family, getattr(transformers, kind)(**settings))
    with pytest.raises(HeadportError, match=reason):
        export(Options(model=str(checkpoint), output=tmp_path / "bundle"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [family]


# family → operators of its lowered backbone besides attention
MEASURED = {"bloom": "", "gpt-oss": "MoE", "deepseek-v3": "MoE"}


@pytest.mark.parametrize("name", MEASURED)
def test_rows_of_the_parity_table(name: str, tmp_path: Path) -> None:
    family = next(f for f in ZOO if f.name == name)
    portable, lowered = table.measure(family, "fp32", ["portable", "ort-cpu"], tmp_path)
    assert portable, portable
    assert lowered, lowered
    assert set(portable.errors) == {*table.CASES, "left"}
    assert set(lowered.errors) == set(table.CASES)
    assert lowered.experts == MEASURED[name]
    assert portable.max_logit > 3  # large enough that a lost feature shows
    if lowered.experts:
        assert min(_with_squared_weights(tmp_path).values()) > 10 * table.BARS["fp16"]


def _with_squared_weights(folder: Path) -> dict[str, float]:
    # Squares keep the ranks of experts, so only a comparison of logits can tell.
    bundle = Bundle.open(folder / "portable")
    graphs = load_graphs(bundle)
    for node in list(graphs["backbone"].graph):
        if node.op_type.startswith("MixtureOfExperts"):
            square = ir.node("Mul", [node.inputs[2], node.inputs[2]])
            graphs["backbone"].graph.insert_before(node, square)
            node.replace_input_with(2, square.outputs[0])
    damaged = folder / "damaged"
    damaged.mkdir()
    files = {name: graph.file for name, graph in bundle.manifest.graphs.items()}
    write_graphs(graphs, files, damaged)
    rows = table.rows_of(VOCAB_SIZE)
    expected = table.reference_logits(folder / "checkpoint", "eager", rows)
    return table.errors_of(Bundle(damaged, bundle.manifest), rows, expected)


def test_the_table_fails_visibly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = table.Row("llama", "fp32", "portable", "", 6.0, {"prefill": 1e-7, "decode": 1e-3})
    monkeypatch.setattr(table, "measure", lambda *_arguments: [row])
    assert table.main(["--only", "llama", "--dtype", "fp32"]) == 1
    assert "FAIL llama" in capsys.readouterr().out
    monkeypatch.setattr(table, "refusal", lambda *_arguments: (False, "exported"))
    assert table.main(["--only", "xlnet"]) == 1
    monkeypatch.setattr(table, "control", lambda *_arguments: (False, "not noticed"))
    assert table.main(["--only", "control"]) == 1
    with pytest.raises(SystemExit, match="unknown: no-such-family"):
        table.main(["--only", "no-such-family"])


def test_a_row_without_a_comparison_has_not_passed() -> None:
    assert not table.Row("llama", "fp32", "portable", "")
    assert not table.Row("llama", "fp32", "portable", "", 6.0, {"prefill": float("nan")})
