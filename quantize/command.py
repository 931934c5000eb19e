"""`headport quantize`: portable bundle → portable bundle with weights stored in fewer bits."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from headport.bundle import Bundle, check_output, draft_bundle, refuse_overlap
from headport.command import Outcome
from headport.errors import UsageError
from headport.graphs import add_stage, load_graphs, rewrite_bundle
from headport.ledger import find_tensor
from headport.manifest import Head, Manifest, Stage
from headport.quantize.backbone import quantize_backbone
from headport.quantize.backbone_plan import backbone_request, refuse_head_options
from headport.quantize.backbone_report import backbone_lines
from headport.quantize.calibration import Calibration, calibrate, calibration_record
from headport.quantize.check import check_head
from headport.quantize.head import HEAD, check_options, quantisable_head, quantise_head
from headport.quantize.options import Options
from headport.quantize.report import CalibrationReport, make_report, summary
from headport.selftest import write_selftest

__all__ = ["SUMMARY", "Options", "check", "quantize", "run"]

SUMMARY = "Quantise the head, the backbone or the embedding of a portable bundle."


def check(options: Options) -> None:
    """Refuse options that contradict each other, or ask for nothing.

    Raises:
        UsageError: If they do.
    """
    asked = backbone_request(options)
    if options.head != "none":
        check_options(options)
        return
    refuse_head_options(options)
    if not asked:
        raise UsageError("nothing to quantise: give --head, --backbone, --override or --embedding")


def quantize(options: Options) -> Bundle:
    """Quantise a bundle: its backbone and embedding first, then its head, as far as asked.

    Raises:
        UsageError: If the options contradict each other, or ask for nothing.
        QuantizeError: If the bundle is lowered, what is asked for is quantised already, or a
            weight cannot be stored as asked.
        OutputError: If the output cannot be written.
        ParityError: If what was written does not multiply with the rounded weights.
    """
    check(options)
    refuse_overlap(options.bundle, options.output)
    request = backbone_request(options)
    if options.head == "none":
        return quantize_backbone(options.bundle, options.output, request, force=options.force)
    if not request:
        return _quantize_head(options)
    quantisable_head(Bundle.open(options.bundle))
    check_output(options.output, force=options.force)
    parent = options.output.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".quantize.", dir=parent) as folder:
        first = quantize_backbone(options.bundle, Path(folder) / options.output.name, request)
        return _quantize_head(msgspec.structs.replace(options, bundle=first.path))


def _quantize_head(options: Options) -> Bundle:
    source = Bundle.open(options.bundle)
    quantisable_head(source)
    with draft_bundle(options.output, force=options.force) as draft:
        calibration = _calibration(options, source)
        made = quantise_head(source, options, calibration)
        models = load_graphs(source) | made.models
        new_heads = {name: f"{name}.onnx" for name in models.keys() - source.manifest.graphs.keys()}
        manifest = rewrite_bundle(source, models, draft.path, new_heads)
        heads = {**manifest.heads, HEAD: _as_stored(manifest, made.entry)}
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


def _as_stored(manifest: Manifest, head: Head) -> Head:
    """The entry with the ledger's name of the weight, which an INT8 embedding may share."""
    weight = find_tensor(manifest, head.graph, head.weight)
    readers = {consumer.partition(":")[0] for consumer in weight.consumers}
    tied = any(manifest.graphs[name].role == "backbone" for name in readers)
    return msgspec.structs.replace(head, weight=weight.name, tied=tied)


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
    made = 1 + (options.head != "none" and bool(backbone_request(options)))
    text = "\n".join(_stage_text(bundle, s) for s in bundle.manifest.provenance.stages[-made:])
    return Outcome(text, _document(options, bundle))


def _stage_text(bundle: Bundle, stage: Stage) -> str:
    if "backbone" in stage.options:
        return "\n".join(backbone_lines(bundle.path.name, stage.report))
    return summary(bundle, stage.options, stage.report)


def _document(options: Options, bundle: Bundle) -> dict[str, Any]:
    return {"bundle": str(options.output), "manifest": bundle.manifest}
