"""Exporting an encoder-decoder checkpoint: encoder, decoder and head, each a graph of its own."""

from __future__ import annotations

import gc
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from headport.bundle import Bundle, draft_bundle
from headport.export.assembly import (
    SESSION_OPTIONS,
    export_phases,
    find_provenance,
    with_export_stage,
    write_draft,
)
from headport.export.checkpoint import Checkpoint, ModelKind, load_model, load_tokenizer
from headport.export.companions import (
    check_tokenizer,
    generation_defaults,
    write_companions,
    write_licence,
)
from headport.export.description import head_entry, vocabulary_entry
from headport.export.encoder_decoder.description import (
    check_vocabularies,
    source_entry,
    target_context,
)
from headport.export.encoder_decoder.families import family_of
from headport.export.encoder_decoder.head import probe_decoder_head
from headport.export.encoder_decoder.parity import plan_sources, prove_sources, sourced_logits
from headport.export.encoder_decoder.trace import decoder_shapes, trace_decoder, trace_encoder
from headport.export.head_graph import build_head
from headport.export.onnx_weights import unused_parameters
from headport.export.position_tables import check_position_tables
from headport.export.precision import convert_model, parameter_bytes
from headport.export.streamed import Road
from headport.export.written import check_written
from headport.manifest import SCHEMA_VERSION, Manifest, Model

__all__ = ["export_encoder_decoder"]

_GRAPH = "head.lm"
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
_ROAD = Road("loaded", "an encoder-decoder model is read as a whole")


def export_encoder_decoder(
    checkpoint: Checkpoint,
    kind: ModelKind,
    dtype: Literal["fp32", "fp16", "bf16"],
    chosen: dict[str, Any],
    output: Path,
    *,
    force: bool,
) -> Bundle:
    """Export a model whose decoder answers to what its encoder reads.

    Args:
        checkpoint: Its weights.
        kind: What it reads: text, or features of speech.
        dtype: Precision of the weights.
        chosen: What was asked for, for the provenance.
        output: Folder to write.
        force: Replace an existing bundle.

    Raises:
        HeadportError: As `headport.export.command.export`.
    """
    with draft_bundle(output, force=force) as draft, export_phases() as phase:
        phase("loading")
        tokenizer = load_tokenizer(checkpoint)
        model = load_model(checkpoint, kind=kind)
        family = family_of(type(model).__name__)
        phase("asking the reference")
        shapes = decoder_shapes(model, family)
        head = probe_decoder_head(model, family)
        check_vocabularies(model, family, head.weight)
        vocabulary = vocabulary_entry(head.weight.shape[0], tokenizer)
        max_context = target_context(model, family)
        source = source_entry(model, family, vocabulary.size)
        plan = plan_sources(model, family, source, max_context)
        reference = sourced_logits(model, family, plan)
        write_companions(checkpoint, tokenizer, model, draft.path)
        phase("tracing")
        if dtype != "fp32":
            head = convert_model(model, head, _DTYPES[dtype], keep_wide=True)
        graphs = {
            "encoder": trace_encoder(model, family, shapes),
            "backbone": trace_decoder(model, family, shapes),
        }
        check_position_tables(graphs["backbone"], max_context)
        report: dict[str, Any] = {
            "weights": asdict(_ROAD),
            "parameters_in_no_graph": unused_parameters(model, *graphs.values()),
            "parameter_bytes": parameter_bytes(model, head),
        }
        phase("writing")
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            license=write_licence(checkpoint, draft.path),
            provenance=find_provenance(checkpoint),
            model=Model(
                architecture=type(model).__name__,
                hidden_size=head.weight.shape[1],
                layers=len(shapes.own),
                max_context=max_context,
                dtype=dtype,
                query_heads=shapes.own[0][0],
            ),
            graphs={},
            heads={"lm": head_entry(head, _GRAPH)},
            tensors=(),
            vocabulary=vocabulary,
            defaults=generation_defaults(model),
            session_options=SESSION_OPTIONS,
            target="portable",
            selftest=None,
            files={},
            source=source,
        )
        graphs[_GRAPH] = build_head(head, _GRAPH)
        manifest = write_draft(manifest, graphs, draft, {})
        report["tensor_bytes"] = sum(tensor.length for tensor in manifest.tensors)
        # The model's memory is given back before ONNX Runtime takes its own.
        del model, head, graphs
        gc.collect()
        phase("comparing with PyTorch")
        preview = draft.preview(manifest)
        check_written(preview)
        proof = prove_sources(preview, plan, reference)
        report["parity"] = asdict(proof.report)
        report["tokenizer_texts"] = check_tokenizer(preview.path, tokenizer)
        return draft.commit(with_export_stage(proof.manifest, chosen, report))
