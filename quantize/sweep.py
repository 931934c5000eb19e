"""`headport sweep`: many head recipes on one pass of the backbone, as a table of trade-offs."""

from __future__ import annotations

import platform
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec

from headport.bundle import Bundle
from headport.command import OptionRecord, Outcome, option, positional
from headport.errors import QuantizeError, UsageError
from headport.machine import usable_cpus
from headport.progress import track
from headport.quantize.calibration import Calibration, calibrate, calibration_record
from headport.quantize.chosen_heads import chosen_heads
from headport.quantize.head import HEAD
from headport.quantize.recipes import DEFAULT_RECIPES, Recipe, parse_recipe
from headport.quantize.report_files import check_report_files, write_reports
from headport.quantize.shared_texts import refuse_shared_texts
from headport.quantize.states import collect_states
from headport.quantize.sweep_report import pareto, render_markdown, render_webpage, terminal_lines
from headport.quantize.trial import Ground, Trial, try_recipe
from headport.session import SessionSettings, library_version

__all__ = ["SUMMARY", "Options", "run", "sweep"]

SUMMARY = "Try recipes for the head of a portable bundle and show what each costs and loses."


class Options(OptionRecord, frozen=True):
    """Options of `headport sweep`."""

    bundle: Annotated[Path, positional("portable bundle with an unquantised head")]
    text: Annotated[
        tuple[Path, ...], option("texts to measure on, one document each", metavar="FILE")
    ]
    calibration: Annotated[
        tuple[Path, ...],
        option("texts to compensate errors on; others than --text", metavar="FILE"),
    ] = ()
    recipe: Annotated[
        tuple[str, ...],
        option(
            "recipes such as head=int4,block=32,compensated (default: twenty of all formats, "
            "compensated ones only with --calibration)",
            metavar="RECIPE",
        ),
    ] = ()
    tokens: Annotated[int, option("at most this many tokens of the texts", metavar="N")] = 3072
    calibration_tokens: Annotated[
        int, option("at most this many tokens of the calibration texts", metavar="N")
    ] = 4096
    threads: Annotated[int, option("threads of ONNX Runtime; 0 = all CPUs")] = 0
    report: Annotated[
        tuple[Path, ...],
        option("write the report here: .json, .md or .html by the name", metavar="FILE"),
    ] = ()
    force: Annotated[bool, option("replace existing reports")] = False


class SweepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep found; `trials` in the order of the recipes."""

    bundle: str
    checkpoint: str
    texts: list[dict[str, str]]
    calibration: list[dict[str, str]]
    calibration_positions: int
    positions: int
    threads: int
    machine: str
    onnxruntime: str
    seconds_backbone: float  # one pass over texts and calibration texts
    trials: tuple[Trial, ...]
    refused: dict[str, str]  # recipe → why this head cannot be stored so
    pareto: tuple[str, ...]  # recipes that no other beats in bytes, KL and step at once
    worst: dict[str, list[str]]  # recipe → the tokens it hurts most, in their context


_RENDERERS = {".md": render_markdown, ".html": render_webpage}


def sweep(options: Options) -> SweepReport:
    """Try every recipe.

    Raises:
        UsageError: If a recipe is wrong or needs calibration texts, or a text cannot be read.
        QuantizeError: If the bundle is lowered or its head quantised already, or a weight cannot
            be stored as a recipe asks.
    """
    recipes = _recipes(options)
    refuse_shared_texts(
        options.text,
        options.calibration,
        ("--text", "--calibration"),
        "figures on the text that errors were compensated on flatter, give others",
    )
    source = Bundle.open(options.bundle)
    source.require_decoder_only(
        "a sweep of recipes", "quantise its head with `headport quantize --head`"
    )
    chosen_heads(source, [HEAD])
    settings = SessionSettings(threads=options.threads)
    with tempfile.TemporaryDirectory(prefix="headport.") as folder:
        work = Path(folder)
        start = time.perf_counter()
        calibration = _calibration(source, options, work, settings)
        (work / "text").mkdir()
        states = collect_states(source, options.text, work / "text", options.tokens, settings)
        seconds = time.perf_counter() - start
        ground = Ground.prepare(source, states, calibration, work, settings)
        trials, refused = _try_all(recipes, ground)
        worst = {t.recipe: [states.context(n) for n in t.worst] for t in trials}
    return SweepReport(
        bundle=options.bundle.name,
        checkpoint=source.manifest.provenance.checkpoint,
        texts=calibration_record(options.text),
        calibration=calibration_record(options.calibration),
        calibration_positions=calibration.positions if calibration else 0,
        positions=len(states.states),
        threads=options.threads or usable_cpus(),
        machine=f"{platform.machine()}, Python {platform.python_version()}",
        onnxruntime=library_version(),
        seconds_backbone=seconds,
        trials=trials,
        refused=refused,
        pareto=pareto(trials),
        worst=worst,
    )


def _try_all(recipes: list[Recipe], ground: Ground) -> tuple[tuple[Trial, ...], dict[str, str]]:
    trials, refused = [], {}
    for recipe in track(recipes, "recipes", unit="recipe"):
        try:
            trials.append(try_recipe(recipe, ground))
        except QuantizeError as error:
            refused[recipe.text] = str(error)
    if not trials:
        raise QuantizeError("; ".join(f"{name}: {why}" for name, why in refused.items()))
    return tuple(trials), refused


def _recipes(options: Options) -> list[Recipe]:
    asked = options.recipe or DEFAULT_RECIPES
    recipes = [parse_recipe(text, options.bundle, options.bundle) for text in asked]
    if options.calibration:
        return recipes
    if options.recipe and any(recipe.compensated for recipe in recipes):
        raise UsageError("a compensated recipe needs texts to compensate on: give --calibration")
    return [recipe for recipe in recipes if not recipe.compensated]


def _calibration(
    source: Bundle, options: Options, work: Path, settings: SessionSettings
) -> Calibration | None:
    if not options.calibration:
        return None
    (work / "calibration").mkdir()
    states = collect_states(
        source,
        options.calibration,
        work / "calibration",
        options.calibration_tokens,
        settings,
    )
    return calibrate(states.parts(), source.manifest.model.hidden_size)


def run(options: Options) -> Outcome:
    """Sweep, write the reports, and print the table."""
    check_report_files(options.report, _RENDERERS, force=options.force)
    report = sweep(options)
    table = "\n".join(terminal_lines(msgspec.to_builtins(report)))
    document = write_reports(options.report, report, _RENDERERS, table, force=options.force)
    return Outcome(table, document)
