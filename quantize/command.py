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
from headport.head_parts import all_parts, with_heads
from headport.ledger import find_tensor
from headport.manifest import Head, Manifest, Stage
from headport.quantize.backbone import described_head, quantize_backbone
from headport.quantize.backbone_plan import backbone_request, refuse_head_options
from headport.quantize.backbone_report import backbone_lines
from headport.quantize.calibration import Calibration, calibrate, calibration_record
from headport.quantize.check import check_head
from headport.quantize.chosen_heads import chosen_heads
from headport.quantize.head import HEAD, QuantisedHead, check_options, quantise_head
from headport.quantize.options import Options
from headport.quantize.report import (
    CalibrationReport,
    QuantizeReport,
    make_report,
    summary,
)
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
    chosen_heads(Bundle.open(options.bundle), options.name)
    check_output(options.output, force=options.force)
    parent = options.output.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".quantize.", dir=parent) as folder:
        first = quantize_backbone(options.bundle, Path(folder) / options.output.name, request)
        return _quantize_head(msgspec.structs.replace(options, bundle=first.path))


def _quantize_head(options: Options) -> Bundle:
    source = Bundle.open(options.bundle)
    chosen = chosen_heads(source, options.name)
    _check_chosen(options, chosen)
    with draft_bundle(options.output, force=options.force) as draft:
        calibration = _calibration(options, source)
        made = {name: quantise_head(source, options, calibration, name) for name in chosen}
        models = load_graphs(source)
        for each in made.values():
            models |= each.models
        new_heads = {name: f"{name}.onnx" for name in models.keys() - source.manifest.graphs.keys()}
        manifest = rewrite_bundle(source, models, draft.path, new_heads)
        stored = {name: _as_stored(manifest, each.entry) for name, each in made.items()}
        # A weight that another head shared with one of these has a name of its own now.
        reader = next(n for n, g in manifest.graphs.items() if g.role in ("backbone", "encoder"))
        others = {
            name: described_head(source.manifest, manifest, head, reader)
            for name, head in all_parts(manifest).items()
            if name not in stored
        }
        preview = draft.preview(with_heads(manifest, stored | others))
        reports = {
            name: _report(source, preview, name, each, calibration) for name, each in made.items()
        }
        manifest = write_selftest(preview)
        for name, each in made.items():
            settings = each.chosen | ({} if name == HEAD else {"name": name})
            if calibration is not None:
                settings |= {"calibration": calibration_record(options.calibration)}
            manifest = add_stage(manifest, "quantize", settings, asdict(reports[name]))
        return draft.commit(manifest)


def _check_chosen(options: Options, chosen: dict[str, Head]) -> None:
    """Refuse what only a head on the backbone's own hidden states can be given."""
    others = [name for name in chosen if name != HEAD]
    if others and (options.rescore is not None or options.certify):
        raise UsageError(
            f"--rescore and --certify are for the head {HEAD} alone, {', '.join(others)} would be "
            f"quantised too; pass --name {HEAD}"
        )
    behind = [name for name, head in chosen.items() if head.transform is not None]
    if behind and options.calibration:
        raise UsageError(
            f"--calibration: {', '.join(behind)} get states that another graph makes of hidden "
            "states, which calibration does not see; leave it out, or name other heads"
        )


def _report(
    source: Bundle,
    written: Bundle,
    name: str,
    made: QuantisedHead,
    calibration: Calibration | None,
) -> QuantizeReport:
    check = check_head(source, written, made.bias, name=name, calibration=calibration)
    report = make_report(
        *(source.manifest, written.manifest, name, made.stored, made.weight_bytes), check=check
    )
    if calibration is None:
        return report
    gain = made.loss_ratio or 1.0
    return replace(report, calibration=CalibrationReport(calibration.positions, gain))


def _as_stored(manifest: Manifest, head: Head) -> Head:
    """The entry with the ledger's name of the weight, which an INT8 embedding may share."""
    weight = find_tensor(manifest, head.graph, head.weight)
    readers = {consumer.partition(":")[0] for consumer in weight.consumers}
    tied = any(manifest.graphs[name].role == "backbone" for name in readers)
    return msgspec.structs.replace(head, weight=weight.name, tied=tied)


def _calibration(options: Options, source: Bundle) -> Calibration | None:
    if not options.calibration:
        return None
    source.require_decoder_only("--calibration", "leave it out")
    from headport.quantize.states import collect_states

    with tempfile.TemporaryDirectory(prefix="headport.") as folder:
        found = collect_states(
            source, options.calibration, Path(folder), options.calibration_tokens
        )
        return calibrate(found.parts(), source.manifest.model.hidden_size)


def run(options: Options) -> Outcome:
    """Quantise and say what was made."""
    bundle = quantize(options)
    before = Bundle.open(options.bundle, verify=False).manifest.provenance.stages
    made = bundle.manifest.provenance.stages[len(before) :]
    text = "\n".join(_stage_text(bundle, stage) for stage in made)
    return Outcome(text, _document(options, bundle))


def _stage_text(bundle: Bundle, stage: Stage) -> str:
    if "backbone" in stage.options:
        return "\n".join(backbone_lines(bundle.path.name, stage.report))
    return summary(bundle, stage.options, stage.report)


def _document(options: Options, bundle: Bundle) -> dict[str, Any]:
    return {"bundle": str(options.output), "manifest": bundle.manifest}
