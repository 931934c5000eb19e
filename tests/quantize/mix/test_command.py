"""`headport mix` on a tiny model, with and without a matrix that INT4 ruins."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle, draft_bundle
from headport.cli import main
from headport.errors import OutputError, ParityError, QuantizeError, UsageError
from headport.graphs import load_graphs, rewrite_bundle
from headport.lowering.matrices import find_matrices
from headport.manifest import Source
from headport.metrics import score_rows
from headport.quantize.command import quantize
from headport.quantize.mix.command import Options, mix
from headport.quantize.mix.reading import Reader, batches
from headport.quantize.mix.report import MixReport
from headport.quantize.options import Options as QuantizeOptions
from headport.quantize.states import read_ids, text_windows
from headport.runner import open_runner
from headport.selftest import write_selftest
from headport.session import SessionSettings

GATE, SPOILT = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "down"))
CHANNELS = [5, 70]  # one in each block of 64
TEXT = "Sphinx of black quartz, judge my vow. Pack my box with five dozen liquor jugs. " * 4


def _channel_unused(source: Path, folder: Path, outlier: float) -> Path:
    """A copy in which `SPOILT` reads channels that are always zero, with weights of this size.

    They change no answer, but every block holds such a weight.
    """
    bundle = Bundle.open(source)
    models = load_graphs(bundle)
    matrices = {matrix.name: matrix for matrix in find_matrices(models["backbone"])[0]}
    for name, side, value in ((GATE, 0, 0.0), (SPOILT, 1, outlier)):
        matrix = matrices[name]
        weight = matrix.value.const_value.numpy().copy()  # type: ignore[union-attr]
        outputs_first = weight if matrix.rows_first else weight.T
        (outputs_first if side == 0 else outputs_first.T)[CHANNELS] = value
        matrix.value.const_value = ir.tensor(weight, name=matrix.value.name)
    with draft_bundle(folder, force=False) as draft:
        manifest = rewrite_bundle(bundle, models, draft.path)
        draft.commit(write_selftest(draft.preview(manifest)))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mix")
    (folder / "text.txt").write_text(TEXT)
    (folder / "other.txt").write_text("How vexingly quick daft zebras jump! " * 6)
    return folder


@pytest.fixture(scope="module")
def spoilt(tiny_bundle: Path, folder: Path) -> Path:
    return _channel_unused(tiny_bundle, folder / "spoilt", 3.0)


def _mix(bundle: Path, folder: Path, **changes: Any) -> MixReport:
    asked = {"text": (folder / "text.txt",), "tokens": 48, "depth_parts": 2, "threads": 1}
    return mix(Options(bundle=bundle, **{**asked, **changes}))


@pytest.fixture(scope="module")
def kept(spoilt: Path, folder: Path) -> MixReport:
    """The mix that saves all bytes but those of the matrix that INT4 ruins."""
    smallest = _mix(spoilt, folder, budget_bytes=1)
    [saved] = [g.bytes_saved for g in smallest.groups if g.label.endswith("mlp.down_proj 0")]
    assert not smallest.met and smallest.chosen.groups == len(smallest.groups) == 14
    return _mix(spoilt, folder, budget_bytes=smallest.chosen.nbytes + saved)


def test_the_matrix_with_outliers_stays_int8(
    kept: MixReport, tiny_bundle: Path, folder: Path
) -> None:
    assert kept.met and [g.label for g in kept.groups if not g.chosen] == [
        "model.layers.*.mlp.down_proj 0"
    ]
    assert kept.options["override"] == ("model.layers.0.mlp.down_proj=int8:64",)
    prices = [g.alone.kl_mean / g.bytes_saved for g in kept.groups]
    assert prices == sorted(prices) and prices[-1] > 1.5 * prices[-2]
    assert kept.chosen.held_out.kl_mean < kept.all_small.held_out.kl_mean / 2
    # The same model without them: the matrix is one like the others.
    plain = _channel_unused(tiny_bundle, folder / "plain", 0.0)
    found = _mix(plain, folder, budget_bytes=kept.chosen.nbytes)
    ranks = [g.label for g in found.groups]
    assert ranks.index("model.layers.*.mlp.down_proj 0") < len(ranks) - 1


def test_the_command_makes_the_bundle_that_was_measured(
    kept: MixReport, spoilt: Path, folder: Path
) -> None:
    assert kept.command is not None
    assert main([*shlex.split(kept.command)[1:], "--quiet"]) == 0
    made = Bundle.open(f"{spoilt}-mix")
    record = made.manifest.backbone_quantization
    assert record is not None
    small = {
        name for name, how in record.matrices.items() if (how.format, how.block) == ("int4", 64)
    }
    assert len(record.matrices) == 14 and set(record.matrices) - small == {SPOILT}
    matrices = sum(
        t.length for t in made.manifest.tensors if t.name.endswith((".int4", ".int8", ".scale"))
    )
    assert matrices == kept.chosen.nbytes
    source = Bundle.open(spoilt)
    [ids] = read_ids(source, [folder / "text.txt"], 96)
    [window] = text_windows(ids[len(ids) // 2 :])
    logits = []
    for bundle in (source, made):
        runner = open_runner(bundle, SessionSettings(threads=1))
        length = len(window) - 1
        cache = runner.new_cache(1, length)
        [hidden] = runner.forward(cache, window[None, :-1], np.array([length]))
        logits.append(runner.full_logits(hidden))
    scores = score_rows(*logits, window[1:], np.zeros(len(window) - 1))
    assert kept.chosen.held_out.positions == len(scores)
    assert kept.chosen.held_out.kl_mean == pytest.approx(float(scores.kl.mean()), rel=1e-3)


def test_budgets_of_quality(spoilt: Path, kept: MixReport, folder: Path) -> None:
    limit = (kept.all_large.held_out.kl_mean + kept.all_small.text.kl_mean) / 2
    held_out = (folder / "other.txt",)
    found = _mix(spoilt, folder, budget_kl=limit, held_out=held_out, depth_parts=1)
    assert found.met and 0 < found.chosen.groups < len(found.groups) == 7
    assert max(found.chosen.text.kl_mean, found.chosen.held_out.kl_mean) <= limit
    assert [text["name"] for text in found.held_out] == ["other.txt"]
    assert found.own_kl < 1e-9


def test_a_budget_that_cannot_be_met(
    tiny_bundle: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [tmp_path / "r.json", tmp_path / "r.md"]
    arguments = ["mix", str(tiny_bundle), "--text", str(folder / "text.txt"), "--threads", "1"]
    arguments += ["--tokens", "16", "--depth-parts", "1", "--budget-ppl", "1.0000001"]
    arguments += ["--formats", "int4:64", "int4:32", "--report", *map(str, names)]
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert "NOT met by any mix; this is the nearest" in shown
    assert f"headport quantize {tiny_bundle} -o {tiny_bundle}-mix --backbone int4 " in shown
    report = json.loads(names[0].read_text())
    assert report["met"] is False and report["chosen"]["groups"] == 0
    assert len(report["texts"][0]["sha256"]) == 64
    assert "`model.layers.*.self_attn.q_proj 0-1`" in names[1].read_text()
    assert main(arguments) == 2  # the reports are there
    assert OutputError.exit_code == 2


def test_other_matrices_than_the_bundles_are_noticed(
    tiny_bundle: Path, folder: Path, tmp_path: Path
) -> None:
    source = Bundle.open(tiny_bundle)
    reader = Reader(source, tmp_path, SessionSettings(threads=1))
    [ids] = read_ids(source, [folder / "text.txt"], 16)
    reading = reader.read(text_windows(ids))
    weights = {m.value.name or "": m.value.const_value.numpy() for m in reader.matrices}  # type: ignore[union-attr]
    assert reader.check(weights, reading).kl_mean < 1e-9
    name = next(iter(weights))
    with pytest.raises(ParityError, match="with its own matrices handed in differs"):
        reader.check(weights | {name: weights[name] * np.float32(1.1)}, reading)


def test_windows_read_at_once_are_read_as_alone(
    tiny_bundle: Path, folder: Path, tmp_path: Path
) -> None:
    source = Bundle.open(tiny_bundle)
    reader = Reader(source, tmp_path, SessionSettings(threads=1))
    [ids] = read_ids(source, [folder / "text.txt"], 64)
    windows = [ids[:9], ids[8:50], ids[49:52]]
    together = reader.read(windows).logits
    alone = [reader.read([window]).logits for window in windows]
    assert together.shape == (8 + 41 + 2, 257)
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-4)
    long = [np.zeros(n, np.int64) for n in (513, 513, 513, 100, 100)]
    assert [len(batch) for batch in batches(long)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "one of --budget-kl, --budget-ppl and --budget-bytes was expected, 0 given"),
        ({"budget_kl": 0.1, "budget_bytes": 9}, "2 given"),
        ({"budget_kl": 0.0}, "--budget-kl 0.0: nats of mean KL above 0 expected"),
        ({"budget_ppl": 1.0}, "--budget-ppl 1.0: a perplexity ratio above 1"),
        ({"budget_ppl": float("nan")}, "--budget-ppl nan"),
        ({"budget_bytes": 0}, "--budget-bytes 0"),
        ({"budget_kl": 1.0, "tokens": 1}, "--tokens: at least 2 expected, 1 given"),
        ({"budget_kl": 1.0, "depth_parts": 0}, "--depth-parts: at least 1 expected, 0 given"),
        ({"budget_kl": 1.0, "formats": ("int4",)}, "expected, 1 given"),
        ({"budget_kl": 1.0, "text": (Path("absent.txt"),)}, "absent.txt: cannot be read"),
        (
            {"budget_kl": 1.0, "formats": ("int8:16", "int8:64")},
            "the first takes .* bytes for .*; the smaller one was expected first",
        ),
    ],
)
def test_wrong_use(tiny_bundle: Path, folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _mix(tiny_bundle, folder, **changes)


def test_texts_that_are_none(tiny_bundle: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.txt").write_text(TEXT + "\n")
    with pytest.raises(UsageError, match="is both --text and --held-out"):
        _mix(tiny_bundle, folder, budget_kl=1.0, held_out=(tmp_path / "copy.txt",))
    twice = (tmp_path / "copy.txt", tmp_path / "again.txt")
    twice[1].write_text(TEXT)
    with pytest.raises(UsageError, match=r"again\.txt is --text twice .*copy\.txt"):
        _mix(tiny_bundle, folder, budget_kl=1.0, text=twice)
    (tmp_path / "short.txt").write_text("a b")
    with pytest.raises(UsageError, match=r"short\.txt: text of four tokens or more"):
        _mix(tiny_bundle, folder, budget_kl=1.0, text=(tmp_path / "short.txt",))


def test_bundles_that_cannot_be_mixed(
    tiny_bundle: Path, tiny_lowered: Path, folder: Path, tmp_path: Path
) -> None:
    options = QuantizeOptions(bundle=tiny_bundle, output=tmp_path / "q", backbone="int8")
    quantised = quantize(options).path
    for bundle, message in (
        (tiny_lowered, "is lowered to ort-cpu"),
        (quantised, "the backbone is quantised already"),
    ):
        with pytest.raises(QuantizeError, match=message):
            _mix(bundle, folder, budget_kl=1.0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"heads": {}}, QuantizeError, "a head 'lm' was expected"),
        ({"source": Source(None, 99)}, UsageError, "is the bundle of an encoder-decoder model"),
    ],
)
def test_bundles_without_what_is_compared(
    tiny_bundle: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    manifest = msgspec.structs.replace(Bundle.open(tiny_bundle).manifest, **changes)
    monkeypatch.setattr(Bundle, "open", lambda path: Bundle(path, manifest))
    with pytest.raises(error, match=message):
        _mix(tiny_bundle, folder, budget_kl=1.0)
