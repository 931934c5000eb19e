"""`headport export`: checkpoint → bundle, done only after parity on the written files."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import onnx_ir as ir
import torch

from headport.bundle import Bundle, Draft, draft_bundle, refuse_overlap
from headport.command import OptionRecord, Outcome, option, positional
from headport.errors import ExportError
from headport.export.checkpoint import (
    Checkpoint,
    checkpoint_sha256,
    find_checkpoint,
    load_model,
    load_tokenizer,
)
from headport.export.companions import (
    check_tokenizer,
    generation_defaults,
    write_companions,
    write_licence,
)
from headport.export.deferred import NotDeferrableError
from headport.export.description import (
    attention_windows,
    context_length,
    head_entry,
    library_versions,
    model_entry,
    vocabulary_entry,
)
from headport.export.head import probe_head
from headport.export.head_graph import build_head
from headport.export.hygiene import check_constants
from headport.export.names import note_provenance
from headport.export.onnx_weights import unused_parameters
from headport.export.parity import plan_parity, prove, reference_logits
from headport.export.position_tables import check_position_tables
from headport.export.precision import convert_model, parameter_bytes
from headport.export.states import chunk_lengths
from headport.export.streamed import Road, load_streamed
from headport.export.trace import cache_shapes, trace_backbone
from headport.export.written import check_written
from headport.graphs import graph_entry, write_graphs
from headport.manifest import SCHEMA_VERSION, Head, Manifest, Provenance, Stage, Tensor
from headport.progress import bar

__all__ = ["SUMMARY", "Options", "export", "run"]

SUMMARY = "Export a checkpoint (Hugging Face folder or .gguf file) to a portable bundle."

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
_FILES = {"backbone": "backbone.onnx", "head.lm": "head.lm.onnx"}
# ONNX Runtime otherwise rounds activations to INT8 where it fuses DequantizeLinear and MatMul.
_SESSION_OPTIONS = {"session.qdq_matmulnbits_accuracy_level": "0"}

_PHASES = 5
_UNSTATED_CONTEXT = 96  # tokens tried where a model states no context length


class Options(OptionRecord, frozen=True):
    """Options of `headport export`."""

    model: Annotated[
        str, positional("Hugging Face folder with safetensors, a .gguf file, or module:function")
    ]
    output: Annotated[Path, option("bundle folder to write", flag="-o", metavar="BUNDLE")]
    dtype: Annotated[
        Literal["fp32", "fp16", "bf16"], option("precision of the weights and of the backbone")
    ] = "fp32"
    trust_remote_code: Annotated[
        bool, option("run Python code that the checkpoint brings; read it first")
    ] = False
    allow_pickle: Annotated[
        bool, option("accept pytorch_model.bin, read by torch's weights-only unpickler")
    ] = False
    force: Annotated[bool, option("replace an existing bundle")] = False


def export(options: Options) -> Bundle:
    """Export a checkpoint to a portable bundle.

    Raises:
        CheckpointError: If the checkpoint cannot be read as a causal language model.
        ExportError: If the model has a feature that cannot be exported faithfully.
        OutputError: If the output cannot be written.
        ParityError: If the written files do not answer like the checkpoint.
    """
    checkpoint = find_checkpoint(
        options.model,
        trust_remote_code=options.trust_remote_code,
        allow_pickle=options.allow_pickle,
    )
    if options.dtype not in _DTYPES:
        raise ExportError(
            "bf16 was asked for, but ONNX Runtime's CPU kernels do not compute in bfloat16, so "
            "the written files could not be checked on this machine; use fp16 or fp32"
        )
    if Path(options.model).is_dir():
        refuse_overlap(options.model, options.output)
    with draft_bundle(options.output, force=options.force) as draft, _phases() as phase:
        phase("loading")
        tokenizer = load_tokenizer(checkpoint)
        # One load serves the reference and the trace: everything the reference has to say is
        # taken down before anything of the model is replaced.
        model, road = load_streamed(checkpoint)
        phase("asking the reference")
        shapes = cache_shapes(model)
        head = probe_head(model)
        max_context = context_length(model) or _UNSTATED_CONTEXT
        crossed = (*_window_hint(model), *chunk_lengths(shapes))
        plan = plan_parity(_vocabulary_rows(model), max_context, crossed)
        reference = reference_logits(model, plan)
        write_companions(checkpoint, tokenizer, model, draft.path)
        phase("tracing")
        if options.dtype != "fp32":
            head = convert_model(model, head, _DTYPES[options.dtype])
        try:
            backbone = trace_backbone(model, shapes)
        except NotDeferrableError as error:
            model, road = load_model(checkpoint), Road("loaded", str(error))
            head = convert_model(model, head, _DTYPES[options.dtype])
            backbone = trace_backbone(model, shapes)
        check_position_tables(backbone, max_context)
        windows = attention_windows(backbone)
        plan.check_windows(windows, max_context)
        phase("writing")
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            license=write_licence(checkpoint, draft.path),
            provenance=_provenance(checkpoint),
            model=model_entry(model, backbone, head, options.dtype),
            graphs={},
            heads={"lm": head_entry(head, "head.lm")},
            tensors=(),
            vocabulary=vocabulary_entry(head, tokenizer),
            defaults=generation_defaults(model),
            session_options=_SESSION_OPTIONS,
            target="portable",
            selftest=None,
            files={},
        )
        graphs = {"backbone": backbone, "head.lm": build_head(head, "head.lm")}
        for graph in graphs.values():
            origin = manifest.provenance
            note_provenance(graph, origin.checkpoint, origin.sha256, options.dtype)
        manifest = _write(manifest, graphs, draft)
        report: dict[str, Any] = {
            "weights": asdict(road),
            "parameters_in_no_graph": unused_parameters(model, backbone),
            "attention_windows": list(windows),
            "parameter_bytes": parameter_bytes(model, head),
            "tensor_bytes": sum(tensor.length for tensor in manifest.tensors),
        }
        # The model's memory is given back before ONNX Runtime takes its own.
        del model, head, backbone, graphs
        gc.collect()
        phase("comparing with PyTorch")
        preview = draft.preview(manifest)
        check_written(preview)
        proof = prove(preview, plan, reference)
        report["parity"] = asdict(proof.report)
        report["tokenizer_texts"] = check_tokenizer(preview.path, tokenizer)
        return draft.commit(_with_stage(proof.manifest, options, report))


@contextmanager
def _phases() -> Iterator[Callable[[str], None]]:
    with bar(_PHASES, "export", "step") as progress:
        started = False

        def begin(name: str) -> None:
            nonlocal started
            progress.update(int(started))
            started = True
            progress.set_description(f"export: {name}")

        yield begin
        progress.update()


def _vocabulary_rows(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _window_hint(model: Any) -> tuple[int, ...]:
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    return (*getattr(model, "windows", ()), *((window,) if isinstance(window, int) else ()))


def _provenance(checkpoint: Checkpoint) -> Provenance:
    return Provenance(
        checkpoint=checkpoint.name,
        format=checkpoint.format,
        sha256=checkpoint_sha256(checkpoint),
        stages=(),
    )


def _write(manifest: Manifest, graphs: dict[str, ir.Model], draft: Draft) -> Manifest:
    for graph in graphs.values():
        check_constants(graph)
    tensors = write_graphs(graphs, _FILES, draft.path)
    entries = {
        name: graph_entry(graph, _FILES[name], name.split(".")[0]) for name, graph in graphs.items()
    }
    # Equal tensors are stored once, under the name of their first use.
    heads = {
        name: msgspec.structs.replace(head, weight=_ledger_name(tensors, head))
        for name, head in manifest.heads.items()
    }
    return msgspec.structs.replace(manifest, graphs=entries, tensors=tensors, heads=heads)


def _ledger_name(tensors: tuple[Tensor, ...], head: Head) -> str:
    consumer = f"{head.graph}:{head.weight}"
    return next((t.name for t in tensors if consumer in t.consumers), head.weight)


def _with_stage(manifest: Manifest, options: Options, report: dict[str, Any]) -> Manifest:
    stage = Stage(
        stage="export",
        options={
            "dtype": options.dtype,
            **{
                name: True
                for name in ("trust_remote_code", "allow_pickle")
                if getattr(options, name)
            },
        },
        versions=library_versions(),
        report=report,
    )
    provenance = msgspec.structs.replace(manifest.provenance, stages=(stage,))
    return msgspec.structs.replace(manifest, provenance=provenance)


def run(options: Options) -> Outcome:
    """Export and say what was made."""
    bundle = export(options)
    manifest = bundle.manifest
    report = manifest.provenance.stages[-1].report
    parity, head = report["parity"], manifest.heads["lm"]
    worst = max(parity["cases"].values())
    text = "\n".join(
        [
            f"{bundle.path.name}: {manifest.model.architecture}, {manifest.model.dtype}, "
            f"{manifest.model.layers} layers, vocabulary {head.vocab_size}, "
            f"head {'tied' if head.tied else 'untied'}",
            f"tensors {report['tensor_bytes'] / 1e6:.1f} MB for "
            f"{report['parameter_bytes'] / 1e6:.1f} MB of parameters, {_road(report['weights'])}",
            *_leftovers(report),
            f"parity with PyTorch: max |Δlogit| {worst:.2g} over {len(parity['cases'])} ways to "
            f"run it (accepted {parity['limit']:.2g}), the backbone {_pieces(parity['pieces'])}",
        ]
    )
    return Outcome(text, {"bundle": str(options.output), "manifest": manifest})


def _road(weights: dict[str, Any]) -> str:
    if weights["name"] == "streamed":
        return "streamed from the checkpoint's files"
    return f"loaded as a whole ({weights['reason']})"


def _leftovers(report: dict[str, Any]) -> Iterator[str]:
    unused = report["weights"]["unused"]
    if unused:
        yield f"tensors of the checkpoint that the model does not use: {', '.join(unused)}"
    idle = report["parameters_in_no_graph"]
    if idle:
        yield f"parameters that no logit depends on, left out: {', '.join(idle)}"


def _pieces(count: int) -> str:
    return "as a whole" if count == 1 else f"in {count} pieces, one after the other"
