"""`headport quantize`: portable bundle → portable bundle whose head is stored in fewer bits."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from headport.bundle import Bundle, draft_bundle
from headport.command import Outcome
from headport.graphs import add_stage, load_graphs, rewrite_bundle
from headport.quantize.calibration import Calibration, calibrate, calibration_record
from headport.quantize.check import check_head
from headport.quantize.head import HEAD, check_options, quantisable_head, quantise_head
from headport.quantize.options import Options
from headport.quantize.report import CalibrationReport, make_report, summary
from headport.selftest import write_selftest

__all__ = ["SUMMARY", "Options", "quantize", "run"]

SUMMARY = "Quantise the head of a portable bundle; the backbone and the embedding stay as they are."


def quantize(options: Options) -> Bundle:
    """Quantise the head of a bundle.

    Raises:
        UsageError: If the options contradict each other.
        QuantizeError: If the bundle is lowered, its head is quantised already, or its weight
            cannot be stored as asked.
        OutputError: If the output cannot be written.
        ParityError: If the written head does not multiply with the rounded weight.
    """
    check_options(options)
    source = Bundle.open(options.bundle)
    quantisable_head(source)
    with draft_bundle(options.output, force=options.force) as draft:
        calibration = _calibration(options, source)
        made = quantise_head(source, options, calibration)
        models = load_graphs(source) | made.models
        new_heads = {name: f"{name}.onnx" for name in models.keys() - source.manifest.graphs.keys()}
        manifest = rewrite_bundle(source, models, draft.path, new_heads)
        heads = {**manifest.heads, HEAD: made.entry}
        preview = draft.preview(msgspec.structs.replace(manifest, heads=heads))
        check = check_head(source, preview, made.bias, name=HEAD, calibration=calibration)
        report = make_report(
            source.manifest, preview.manifest, made.stored, made.weight_bytes, check
        )
        chosen = made.chosen
        if calibration is not None:
            gain = made.loss_ratio or 1.0
            report = replace(report, calibration=CalibrationReport(calibration.positions, gain))
            chosen |= {"calibration": calibration_record(options.calibration)}
        manifest = write_selftest(preview)
        return draft.commit(add_stage(manifest, "quantize", chosen, asdict(report)))


def _calibration(options: Options, source: Bundle) -> Calibration | None:
    if not options.calibration:
        return None
    from headport.quantize.states import collect_states

    with tempfile.TemporaryDirectory(prefix="headport.") as folder:
        found = collect_states(
            source, options.calibration, Path(folder), options.calibration_tokens
        )
        return calibrate(found.parts(), source.manifest.model.hidden_size)


def run(options: Options) -> Outcome:
    """Quantise and say what was made."""
    bundle = quantize(options)
    stage = bundle.manifest.provenance.stages[-1]
    return Outcome(summary(bundle, stage.options, stage.report), _document(options, bundle))


def _document(options: Options, bundle: Bundle) -> dict[str, Any]:
    return {"bundle": str(options.output), "manifest": bundle.manifest}
