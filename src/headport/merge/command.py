"""`headport merge`: bundle → one model.onnx that other runtimes load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import onnx_ir as ir

from headport import __version__
from headport.bundle import Bundle, draft_bundle
from headport.command import OptionRecord, Outcome, option, positional
from headport.condition import CONDITION_FILE
from headport.errors import MergeError, OutputError, ParityError
from headport.given_rows import refuse_embeddings
from headport.graphs import INLINE_BYTES, load_graphs
from headport.lowering.emit import attribute
from headport.manifest import Manifest
from headport.merge.companions import (
    RECORD,
    read_config,
    write_companions,
    write_json,
    write_record,
)
from headport.merge.genai import CONFIG_FILE, genai_config, left_out
from headport.merge.graph import join_head, mask_from_lengths, store_once, take_position_ids
from headport.merge.parity import HEAD, MergeParity, check_merged, plan_cases
from headport.merge.report import MergeReport, lines
from headport.merge.runtimes import RUNTIMES, Runtime, faults
from headport.progress import say

__all__ = ["SUMMARY", "MergeReport", "Options", "merge", "run"]

SUMMARY = "Merge a bundle's graphs into one model.onnx for onnxruntime-genai and Optimum."

MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
_ALIGNMENT_BYTES = 4096  # ONNX Runtime maps external data page-wise


class Options(OptionRecord, frozen=True):
    """Options of `headport merge`."""

    bundle: Annotated[Path, positional("bundle to read: portable, or lowered to ort-cpu")]
    output: Annotated[Path, option("folder to write", flag="-o", metavar="FOLDER")]
    runtime: Annotated[
        Literal["genai", "optimum", "both"],
        option("what will load it: onnxruntime-genai, Optimum's ORTModelForCausalLM, or both"),
    ] = msgspec.field(default="both", name="for")
    force: Annotated[bool, option("replace a folder that `merge` wrote")] = False


def merge(options: Options) -> MergeReport:
    """Merge a bundle's backbone and head into one graph, with the names other runtimes use.

    Raises:
        MergeError: Naming everything in the bundle that such a runtime cannot run.
        OutputError: If the output cannot be written.
        ParityError: If the written file does not answer like the bundle.
    """
    source = Bundle.open(options.bundle)
    source.require_decoder_only("merging", "use its graphs as they are: encoder, backbone and head")
    refuse_embeddings(source, "merging for other runtimes", "export without it")
    source.require_no_prefix("merging for other runtimes", "run it with headport.runtime")
    if source.path.resolve() in (options.output.resolve(), *options.output.resolve().parents):
        raise OutputError(f"{options.output} lies in the bundle that is merged; choose another")
    runtimes = _runtimes(options)
    config = read_config(source)
    found = faults(source.manifest, config, runtimes)
    if found:
        raise MergeError(f"{source.path} cannot be merged: " + "; ".join(found))
    names = [runtime.name for runtime in runtimes]
    with draft_bundle(options.output, force=options.force, marker=RECORD) as draft:
        models = load_graphs(source)
        manifest = source.manifest
        windows = _windows(_backbone(manifest, models))
        model, positions = _merged(manifest, models, names)
        shared = store_once(model)
        _say_origin(model, manifest)
        _save(model, draft.path)
        changed = write_companions(source, draft.path)
        if "genai" in names:
            genai = genai_config(manifest, config, MODEL_FILE, manifest.heads[HEAD].vocab_size)
            write_json(draft.path / CONFIG_FILE, genai)
        write_record(source, names, draft.path)
        draft.move()
        sides = tuple(runtime.padding for runtime in runtimes)
        cases = plan_cases(
            manifest.model.max_context, windows, manifest.heads[HEAD].vocab_size, sides
        )
        parity = check_merged(source, draft.path / MODEL_FILE, cases, windows)
        _require(parity, names)
        report = MergeReport(
            runtimes=tuple(names),
            head=_head_graph(manifest),
            position_ids=positions,
            initializers_shared=shared,
            data_bytes=(draft.path / DATA_FILE).stat().st_size,
            changed_files=tuple(changed),
            defaults_left_out=tuple(left_out(manifest)) if "genai" in names else (),
            parity=parity,
        )
        draft.place()
    if CONDITION_FILE in source.manifest.files:
        say(
            f"{source.path} takes conditions, which merged graphs cannot be given: they answer as "
            "it does without one"
        )
    return report


def _runtimes(options: Options) -> list[Runtime]:
    return [RUNTIMES[n] for n in (RUNTIMES if options.runtime == "both" else [options.runtime])]


def _backbone(manifest: Manifest, models: dict[str, ir.Model]) -> ir.Model:
    return models[manifest.backbone_name]


def _head_graph(manifest: Manifest) -> str:
    head = manifest.heads[HEAD]
    return head.graph if head.candidates is None else head.candidates.full


def _windows(backbone: ir.Model) -> tuple[int, ...]:
    # Portable calls name it `window`, GroupQueryAttention `local_window_size`, -1 for none.
    found = [attribute(n, "window", attribute(n, "local_window_size", 0)) for n in backbone.graph]
    return tuple(max(0, int(width)) for width in found)


def _merged(
    manifest: Manifest, models: dict[str, ir.Model], names: Sequence[str]
) -> tuple[ir.Model, bool]:
    model = join_head(_backbone(manifest, models), models[_head_graph(manifest)])
    # Optimum asks for an input of this name; where genai reads the file too, positions stay in the
    # graph, which is right for padding on either side.
    positions = list(names) == ["optimum"] and take_position_ids(model)
    if manifest.target == "ort-cpu":
        mask_from_lengths(model)
    return model, positions


def _say_origin(model: ir.Model, manifest: Manifest) -> None:
    # The file may be moved away from its folder; what changes its answers goes with it.
    model.producer_name, model.producer_version = "headport", __version__
    model.metadata_props["headport.checkpoint"] = manifest.provenance.checkpoint
    model.metadata_props["headport.checkpoint_sha256"] = manifest.provenance.sha256
    model.metadata_props["headport.session_options"] = msgspec.json.encode(
        manifest.session_options, order="sorted"
    ).decode()


def _save(model: ir.Model, folder: Path) -> None:
    ir.save(
        model,
        folder / MODEL_FILE,
        external_data=DATA_FILE,
        size_threshold_bytes=INLINE_BYTES,
        alignment=_ALIGNMENT_BYTES,
        align_threshold=_ALIGNMENT_BYTES,
    )


def _require(parity: MergeParity, names: Sequence[str]) -> None:
    if not parity:
        raise ParityError(
            "the merged file does not answer like the bundle: "
            f"{_worst(parity.bundle_options.errors)} of the largest |logit|, {parity.limit:.0e} "
            "is accepted; nothing was written"
        )
    if "optimum" in names and not parity.default_options.within(parity.limit):
        raise ParityError(
            "under ONNX Runtime's default session options, which Optimum uses, the merged file "
            f"answers differently: {_worst(parity.default_options.errors)} of the largest |logit|, "
            f"{parity.limit:.0e} is accepted; nothing was written. Merge it for genai, whose "
            "configuration holds the bundle's options"
        )


def _worst(errors: dict[str, float]) -> str:
    name = max(errors, key=lambda key: errors[key])
    return f"{name!r} differs by {errors[name]:.2g}"


def run(options: Options) -> Outcome:
    """Merge and say what was checked and what other session options change."""
    report = merge(options)
    document = {"output": str(options.output), **asdict(report)}
    return Outcome("\n".join(lines(options.output, report)), document)
