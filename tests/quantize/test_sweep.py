"""The sweep: figures that agree with a bundle made the long way, recipes, refusals, reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.cli import main
from headport.errors import OutputError, QuantizeError, UsageError
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.metrics import score_rows
from headport.quantize.command import quantize
from headport.quantize.options import Options as QuantizeOptions
from headport.quantize.recipes import DEFAULT_RECIPES, parse_recipe
from headport.quantize.states import collect_states
from headport.quantize.sweep import Options, sweep
from headport.quantize.sweep_report import pareto, render_markdown, render_webpage
from headport.quantize.trial import Trial
from headport.runner import open_runner

WORDS = "Sphinx of black quartz, judge my vow. Pack my box with five dozen liquor jugs. "


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "text.txt").write_text(WORDS * 3)
    (tmp_path / "other.txt").write_text("How vexingly quick daft zebras jump! " * 12)
    return tmp_path / "text.txt", tmp_path / "other.txt"


def _sweep(bundle: Path, texts: tuple[Path, Path], **changes: Any) -> Any:
    asked: dict[str, Any] = {"text": texts[:1], "calibration": texts[1:], "threads": 1}
    return sweep(Options(bundle=bundle, **{**asked, **changes}))


def test_every_default_recipe_is_tried(tiny_bundle: Path, texts: tuple[Path, Path]) -> None:
    report = _sweep(tiny_bundle, texts)
    assert tuple(t.recipe for t in report.trials) == DEFAULT_RECIPES and len(report.trials) == 20
    found = {t.recipe: t for t in report.trials}
    assert found["head=int8,block=64,certify"].top10_agreement == 1.0
    assert found["head=int4,block=32"].kl_mean > 20 * found["head=int8,block=32"].kl_mean
    assert all(t.positions == report.positions > 100 for t in report.trials)
    assert set(report.pareto) <= set(found) and report.pareto


@pytest.mark.parametrize("recipe", ["head=int8,block=32,activations=rounded", "head=int4,rescore"])
def test_figures_are_those_of_the_bundle(
    tiny_bundle: Path, texts: tuple[Path, Path], tmp_path: Path, recipe: str
) -> None:
    [trial] = _sweep(tiny_bundle, texts, recipe=(recipe,)).trials
    options = parse_recipe(recipe, tiny_bundle, tmp_path / "q").options
    portable = quantize(options)
    made = lower(LowerOptions(bundle=portable.path, output=tmp_path / "l", target="ort-cpu"))
    source = Bundle.open(tiny_bundle)
    states = collect_states(source, texts[:1], tmp_path)
    x = np.asarray(states.states)
    runner = open_runner(made)
    rescored = made.manifest.heads["lm"].candidates is not None
    logits = runner.rescored_logits(x) if rescored else runner.full_logits(x)
    scores = score_rows(
        open_runner(source).full_logits(x), logits, states.targets, np.zeros(len(x))
    )
    assert trial.kl_mean == pytest.approx(float(scores.kl.mean()), rel=1e-3)
    assert trial.top1_agreement == float(scores.agreement[:, 0].mean())
    size = sum(t.length for t in made.manifest.tensors if t.consumers[0].startswith("head.lm:"))
    if not rescored:
        assert trial.stored_bytes == trial.read_bytes == size
    assert trial.resident_bytes is None or trial.resident_bytes > size


def test_states_are_those_of_the_backbone(
    tiny_bundle: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    found = collect_states(Bundle.open(tiny_bundle), texts, tmp_path, limit=41)
    assert len(found.states) == len(found.targets) == len(found.ids) == 42  # 21 of each text
    assert (found.ids[1:21] == found.targets[:20]).all() and found.ids[21] != found.targets[20]
    assert found.context(0).endswith(repr(WORDS[1])) and found.context(22).startswith("'Ho'")


def test_recipes_are_checked_before_anything_runs(tmp_path: Path) -> None:
    for text, message in (
        ("head=int9", "head=int9"),
        ("head=int8,blok=64", "no key 'blok'; known are head, block"),
        ("head=int8,certify=maybe", "certify is a switch"),
        ("head=int4,certify", "--certify needs --head int8"),
        ("block=64", "head"),
        ("head=int8,compensated", "give --calibration"),
    ):
        with pytest.raises(UsageError, match=message):
            sweep(Options(bundle=tmp_path, text=(tmp_path / "t",), recipe=(text,)))


def test_refusals(tiny_bundle: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="both --text and --calibration"):
        _sweep(tiny_bundle, (texts[0], texts[0]))
    copy = texts[0].with_name("copy.txt")
    copy.write_text(texts[0].read_text() + "\n")
    with pytest.raises(UsageError, match="both --text and --calibration"):
        _sweep(tiny_bundle, (texts[0], copy))
    for changes in ({"tokens": 0}, {"calibration_tokens": -3}):
        with pytest.raises(UsageError, match="at least one of each"):
            _sweep(tiny_bundle, texts, recipe=("head=int8,compensated",), **changes)
    quantised = quantize(QuantizeOptions(bundle=tiny_bundle, output=tmp_path / "q", head="int8"))
    with pytest.raises(QuantizeError, match="already stored as int8"):
        _sweep(quantised.path, texts)


def test_a_recipe_that_does_not_apply_stops_no_other(
    tiny_half_bundle: Path, texts: tuple[Path, Path]
) -> None:
    report = _sweep(tiny_half_bundle, texts, recipe=("head=fp16", "head=int8"))
    assert [t.recipe for t in report.trials] == ["head=int8"]
    assert "already stored as float16" in report.refused["head=fp16"]
    with pytest.raises(QuantizeError, match="already stored as float16"):
        _sweep(tiny_half_bundle, texts, recipe=("head=fp16",))


def test_a_long_text_is_read_as_far_as_it_is_needed(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(WORDS * 400)
    (tmp_path / "short").mkdir(), (tmp_path / "long").mkdir()
    bundle, files = Bundle.open(tiny_bundle), [tmp_path / "long.txt"]
    limited = collect_states(bundle, files, tmp_path / "short", limit=700)
    whole = collect_states(bundle, files, tmp_path / "long", limit=20000)
    assert len(limited.ids) == 700 and (limited.ids == whole.ids[:700]).all()


def _trial(recipe: str, size: int, kl: float, step: float) -> Trial:
    empty = dict.fromkeys(Trial.__dataclass_fields__, 0)
    made = Trial(**empty)  # type: ignore[arg-type]
    return replace(made, recipe=recipe, read_bytes=size, kl_mean=kl, step_ratio=step, worst=())


def test_pareto_front() -> None:
    trials = (
        _trial("small", 10, 1e-2, 0.3),
        _trial("exact", 40, 1e-6, 0.9),
        _trial("worse", 41, 1e-5, 0.95),
        _trial("equal step", 10, 1e-2, 0.301),
        _trial("fast", 50, 1e-1, 0.2),
    )
    assert pareto(trials) == ("small", "exact", "equal step", "fast")


def test_reports(
    tiny_bundle: Path, texts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [tmp_path / f"r.{end}" for end in ("json", "md", "html")]
    arguments = ["sweep", str(tiny_bundle), "--text", str(texts[0]), "--threads", "1"]
    arguments += ["--recipe", "head=int8", "head=fp16", "--report", *map(str, names)]
    assert main(arguments) == 0
    assert "head=int8" in capsys.readouterr().out
    report = json.loads(names[0].read_text())
    assert [t["recipe"] for t in report["trials"]] == ["head=int8", "head=fp16"]
    assert render_markdown(report) == names[1].read_text()
    page = names[2].read_text()
    assert render_webpage(report) == page and "<svg" in page and "<script" not in page
    assert main(arguments) == 2  # the reports are there
    assert OutputError.exit_code == 2
    assert main([*arguments[:-3], str(tmp_path / "r.txt")]) == 2


def test_nothing_in_a_text_becomes_markup(
    tiny_bundle: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    hostile = tmp_path / "hostile.txt"
    hostile.write_text("<script>alert(1)</script> | `x` " * 9)
    import msgspec

    report = msgspec.to_builtins(_sweep(tiny_bundle, (hostile, texts[1]), recipe=("head=fp8",)))
    assert "<script>" not in render_webpage(report) + render_markdown(report)
