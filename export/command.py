"""`headport export`: checkpoint → bundle, done only after parity on the written files."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from headport.bundle import Bundle, draft_bundle, refuse_overlap
from headport.command import OptionRecord, Outcome, option, positional
from headport.errors import ExportError
from headport.export.assembly import (
    SESSION_OPTIONS,
    export_phases,
    find_provenance,
    with_export_stage,
    write_draft,
)
from headport.export.checkpoint import (
    SOURCED,
    Checkpoint,
    ModelKind,
    checkpoint_kind,
    find_checkpoint,
    load_model,
    load_tokenizer,
)
from headport.export.classifier import find_layer
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
    model_entry,
    vocabulary_entry,
)
from headport.export.embedded import check_embeddable
from headport.export.embedded_parity import ask_embedded
from headport.export.encoder_decoder.command import export_encoder_decoder
from headport.export.head import HeadTransform
from headport.export.head_graph import build_head
from headport.export.head_parity import HeadReference
from headport.export.heads.condition import write_condition
from headport.export.heads.exported import entries
from headport.export.heads.found import value_head_in
from headport.export.heads.request import HEAD_HELP, HeadRequest, parse_heads
from headport.export.masked import export_masked
from headport.export.onnx_weights import unused_parameters
from headport.export.parity import Embedded, ParityPlan, plan_parity, prove
from headport.export.position_tables import check_position_tables
from headport.export.precision import convert_model, parameter_bytes
from headport.export.states import chunk_lengths
from headport.export.streamed import Road, load_streamed
from headport.export.subject import Subject, find_subject
from headport.export.summary import summary
from headport.export.trace import cache_shapes, trace_backbone
from headport.export.tuning.applied import apply_adapter, check_adaptable
from headport.export.tuning.tuning import Tuning
from headport.export.written import check_written
from headport.manifest import SCHEMA_VERSION, Manifest

__all__ = ["SUMMARY", "Options", "export", "run"]

SUMMARY = "Export a checkpoint (Hugging Face folder or .gguf file) to a portable bundle."

Float32 = npt.NDArray[np.float32]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
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
    head: Annotated[tuple[str, ...], option(HEAD_HELP, metavar="NAME=FILE|auto")] = ()
    adapter: Annotated[
        Path | None, option("apply this adapter, a folder that PEFT wrote", metavar="FOLDER")
    ] = None
    condition: Annotated[
        Path | None, option("projection of conditions that save_condition wrote", metavar="FILE")
    ] = None
    inputs_embeds: Annotated[
        bool, option("let prompts hold rows of embeddings in the place of tokens")
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
    kind, requests = checkpoint_kind(checkpoint), parse_heads(options.head)
    if options.adapter is not None:
        check_adaptable(checkpoint, kind)
    if options.condition is not None and kind != "causal":
        raise ExportError(
            "--condition: conditions are added to hidden states of causal language models alone, "
            f"this is a {kind} model; leave the option out"
        )
    if options.inputs_embeds:
        check_embeddable(checkpoint, kind)
    if kind == "masked":
        return export_masked(
            *(checkpoint, requests, options.dtype, _chosen(options), options.output),
            force=options.force,
        )
    if kind in SOURCED:
        if requests or value_head_in(checkpoint) is not None:
            raise ExportError(
                "--head, or v_head.* in the checkpoint: heads besides the LM head are for "
                "decoder-only models and encoders, this is an encoder-decoder model; leave them out"
            )
        return export_encoder_decoder(
            *(checkpoint, kind, options.dtype, _chosen(options), options.output),
            force=options.force,
        )
    return _export_decoder(checkpoint, kind, requests, options)


def _export_decoder(
    checkpoint: Checkpoint, kind: ModelKind, requests: Sequence[HeadRequest], options: Options
) -> Bundle:
    with draft_bundle(options.output, force=options.force) as draft, export_phases() as phase:
        phase("loading")
        tokenizer = load_tokenizer(checkpoint)
        # One load serves the reference and the trace: everything the reference has to say is
        # taken down before anything of the model is replaced.
        model, road, tuning = _loaded(checkpoint, kind, options.adapter)
        vocabulary = vocabulary_entry(_vocabulary_rows(model), tokenizer)
        dtype = _DTYPES[options.dtype]
        phase("asking the reference")
        if kind != "causal":
            find_layer(model)  # an encoder would be refused for having no cache
        shapes = cache_shapes(model)
        find = partial(find_subject, tokens=vocabulary.size, dtype=dtype)
        subject = find(model, kind, checkpoint, requests)
        # A learnt prefix stands in the context too, before all that a sequence may hold.
        positions = context_length(model) or _UNSTATED_CONTEXT
        max_context = tuning.context_left(positions)
        crossed = (*_window_hint(model), *chunk_lengths(shapes))
        plan = plan_parity(_vocabulary_rows(model), max_context, crossed)
        with tuning.apart():
            reference, others, embedded = _asked(model, subject, plan, options)
        write_companions(checkpoint, tokenizer, model, draft.path)
        write_condition(options.condition, draft.path, subject.transform.weight.shape[1])
        phase("tracing")
        try:
            head, backbone = _traced(model, shapes, subject, dtype, options)
        except NotDeferrableError as error:
            model, road = load_model(checkpoint, kind=kind), Road("loaded", str(error))
            subject = find(model, kind, checkpoint, requests)
            head, backbone = _traced(model, shapes, subject, dtype, options)
        check_position_tables(backbone, positions)
        windows = _windows(backbone, plan, max_context)
        phase("writing")
        heads, task_heads = entries(subject.heads)
        graphs = {"backbone": backbone}
        if subject.classifier is None:
            heads = {"lm": head_entry(head, "head.lm"), **heads}
            graphs["head.lm"] = build_head(head, "head.lm")
        graphs |= {name: graph for each in subject.heads for name, graph in each.graphs.items()}
        own = find_provenance(checkpoint)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            license=write_licence(checkpoint, draft.path),
            provenance=tuning.origin(own),
            model=tuning.shortened(model_entry(model, backbone, head, options.dtype)),
            graphs={},
            heads=heads,
            tensors=(),
            vocabulary=vocabulary,
            defaults=generation_defaults(model),
            session_options=SESSION_OPTIONS,
            target="portable",
            selftest=None,
            files={},
            task_heads=task_heads,
            prefix=tuning.prefix,
        )
        arrays = {name: array for each in subject.heads for name, array in each.files.items()}
        manifest = write_draft(manifest, graphs, draft, arrays)
        tuning.write_prefix(draft.path, manifest.backbone.inputs)
        report: dict[str, Any] = {
            "weights": asdict(road),
            "parameters_in_no_graph": unused_parameters(model, backbone),
            "attention_windows": list(windows),
            "parameter_bytes": parameter_bytes(model, head),
            "tensor_bytes": sum(tensor.length for tensor in manifest.tensors),
            **tuning.report(own),
        }
        # The model's memory is given back before ONNX Runtime takes its own.
        del model, tuning, head, backbone, graphs, subject
        gc.collect()
        phase("comparing with PyTorch")
        preview = draft.preview(manifest)
        check_written(preview)
        proof = prove(preview, plan, reference, others, embedded)
        report["parity"] = asdict(proof.report)
        report["tokenizer_texts"] = check_tokenizer(preview.path, tokenizer)
        return draft.commit(with_export_stage(proof.manifest, _chosen(options), report))


def _loaded(
    checkpoint: Checkpoint, kind: ModelKind, adapter: Path | None
) -> tuple[Any, Road, Tuning]:
    if adapter is None:
        return *load_streamed(checkpoint, kind=kind), Tuning()
    model = load_model(checkpoint, kind=kind)
    tuning = apply_adapter(model, adapter, kind)
    return model, Road("loaded", "an adapter is applied to it"), tuning


def _asked(
    model: Any, subject: Subject, plan: ParityPlan, options: Options
) -> tuple[list[Float32], list[HeadReference], Embedded | None]:
    embedded = ask_embedded(model, plan) if options.inputs_embeds else None
    return *subject.reference(model, plan), embedded


def _traced(
    model: Any, shapes: Any, subject: Subject, dtype: torch.dtype, options: Options
) -> tuple[HeadTransform, ir.Model]:
    head = subject.transform
    if dtype != torch.float32:
        head = convert_model(model, head, dtype)
    with subject.traceable(model):
        return head, trace_backbone(model, shapes, embeddings=options.inputs_embeds)


def _windows(backbone: ir.Model, plan: ParityPlan, max_context: int) -> tuple[int, ...]:
    windows = attention_windows(backbone)
    plan.check_windows(windows, max_context)
    return windows


def _vocabulary_rows(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _window_hint(model: Any) -> tuple[int, ...]:
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    return (*getattr(model, "windows", ()), *((window,) if isinstance(window, int) else ()))


def _chosen(options: Options) -> dict[str, Any]:
    switches = ("trust_remote_code", "allow_pickle", "inputs_embeds")
    chosen: dict[str, Any] = {"dtype": options.dtype}
    chosen |= {name: True for name in switches if getattr(options, name)}
    # Names only: a bundle holds no path of the machine that made it.
    heads = [f"{name}={Path(source).name}" for name, _, source in map(_parts, options.head)]
    chosen |= {"head": heads} if heads else {}
    files = {"adapter": options.adapter, "condition": options.condition}
    return chosen | {n: file.resolve().name for n, file in files.items() if file is not None}


def _parts(head: str) -> tuple[str, str, str]:
    return head.partition("=")


def run(options: Options) -> Outcome:
    """Export and say what was made."""
    bundle = export(options)
    document = {"bundle": str(options.output), "manifest": bundle.manifest}
    return Outcome(summary(bundle), document)
