"""Exporting models that fill in masked tokens: an encoder, and a head over the vocabulary.

An encoder reads texts both ways and keeps no cache, so its bundle holds no backbone. Its head `mlm`
is a head as any other: W and b with the graph before them, wherever the model keeps its bias.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from headport.bundle import Bundle, draft_bundle
from headport.encoder_runner import EncoderRunner
from headport.errors import CheckpointError, ExportError, ParityError, RunError
from headport.export.assembly import (
    SESSION_OPTIONS,
    export_phases,
    find_provenance,
    with_export_stage,
    write_draft,
)
from headport.export.checkpoint import (
    Checkpoint,
    load_model,
    load_tokenizer,
    run_reference,
)
from headport.export.companions import check_tokenizer, write_companions, write_licence
from headport.export.description import context_length, head_entry, vocabulary_entry
from headport.export.encoder_trace import needs_states, trace_states, trace_whole_encoder
from headport.export.head import probe_head
from headport.export.head_graph import build_head
from headport.export.head_parity import (
    HeadReference,
    check_heads,
    compare_heads,
    measure_heads,
    reference_heads,
)
from headport.export.heads.attach import export_heads, given_heads
from headport.export.heads.exported import ExportedHead, entries
from headport.export.heads.request import HeadRequest
from headport.export.onnx_weights import unused_parameters
from headport.export.parity import (
    RELATIVE,
    ParityPlan,
    ParityReport,
    plan_parity,
    reference_logits,
)
from headport.export.precision import convert_model, parameter_bytes
from headport.export.streamed import Road
from headport.export.written import check_written
from headport.manifest import SCHEMA_VERSION, Manifest, Model
from headport.selftest import write_selftest

__all__ = ["MASKED_HEAD", "export_masked"]

Float32 = npt.NDArray[np.float32]

MASKED_HEAD = "mlm"
_GRAPH = f"head.{MASKED_HEAD}"
_STATES = f"{_GRAPH}.states"
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
_ROAD = Road("loaded", "an encoder is read as a whole")


def export_masked(
    checkpoint: Checkpoint,
    requests: Sequence[HeadRequest],
    dtype: Literal["fp32", "fp16", "bf16"],
    chosen: dict[str, Any],
    output: Path,
    *,
    force: bool,
) -> Bundle:
    """Export a model that fills in masked tokens.

    Args:
        checkpoint: Its weights.
        requests: Heads besides its own, on the encoder's hidden states.
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
        model = load_model(checkpoint, kind="masked")
        facts = _facts(model, dtype)
        rows = int(model.get_input_embeddings().weight.shape[0])
        vocabulary = vocabulary_entry(rows, tokenizer)
        phase("asking the reference")
        beside = export_heads(
            given_heads(checkpoint, requests),
            hidden_size=facts.hidden_size,
            rows=rows,
            tokens=vocabulary.size,
            dtype=_DTYPES[dtype],
        )
        head = probe_head(model)
        plan = plan_parity(rows, facts.max_context, ())
        references = _references(model, plan, beside)
        has_states = needs_states(model, facts.hidden_size)
        write_companions(checkpoint, tokenizer, model, draft.path)
        phase("tracing")
        if dtype != "fp32":
            head = convert_model(model, head, _DTYPES[dtype])
        graphs = {"encoder": trace_whole_encoder(model, facts.max_context)}
        if has_states:
            graphs[_STATES] = trace_states(model, facts.hidden_size, _STATES)
        report: dict[str, Any] = {
            "weights": asdict(_ROAD),
            "parameters_in_no_graph": unused_parameters(model, *graphs.values()),
            "parameter_bytes": parameter_bytes(model, head),
        }
        phase("writing")
        own = msgspec.structs.replace(
            head_entry(head, _GRAPH), transform=_STATES if has_states else None
        )
        heads, task_heads = entries(beside)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            license=write_licence(checkpoint, draft.path),
            provenance=find_provenance(checkpoint),
            model=facts,
            graphs={},
            heads={MASKED_HEAD: own, **heads},
            tensors=(),
            vocabulary=vocabulary,
            defaults={},
            session_options=SESSION_OPTIONS,
            target="portable",
            selftest=None,
            files={},
            task_heads=task_heads,
        )
        graphs = {**graphs, _GRAPH: build_head(head, _GRAPH), **_graphs_of(beside)}
        arrays = {name: array for each in beside for name, array in each.files.items()}
        manifest = write_draft(manifest, graphs, draft, arrays)
        report["tensor_bytes"] = sum(tensor.length for tensor in manifest.tensors)
        del model, head, graphs, beside
        gc.collect()
        phase("comparing with PyTorch")
        preview = draft.preview(manifest)
        check_written(preview)
        parity = _prove(preview, plan, references)
        report["parity"] = asdict(parity)
        report["tokenizer_texts"] = check_tokenizer(preview.path, tokenizer)
        manifest = write_selftest(preview)
        return draft.commit(with_export_stage(manifest, chosen, report))


def _graphs_of(heads: Sequence[ExportedHead]) -> dict[str, ir.Model]:
    return {name: graph for head in heads for name, graph in head.graphs.items()}


def _facts(model: Any, dtype: Literal["fp32", "fp16", "bf16"]) -> Model:
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder or getattr(config, "is_decoder", False):
        raise ExportError(
            f"{name}: an encoder that reads texts both ways was expected, its config says that it "
            "decodes"
        )
    if model.base_model is model or model.get_output_embeddings() is None:
        raise ExportError(f"{name}: an encoder with a head over the vocabulary was expected")
    context = _readable_tokens(model)
    ids = torch.zeros((1, 2), dtype=torch.int64)
    states = run_reference(model.base_model, input_ids=ids).last_hidden_state
    return Model(
        architecture=name,
        hidden_size=states.shape[-1],
        layers=int(getattr(config, "num_hidden_layers", 0)),
        max_context=context,
        dtype=dtype,
    )


def _readable_tokens(model: Any) -> int:
    # Where positions begin behind the padding token's, a table holds fewer than its config says.
    stated = context_length(model)
    if stated is None:
        raise ExportError(f"{type(model).__name__}: its config states no context length")
    padding = getattr(model.config, "pad_token_id", None)
    for tokens in (stated, stated - (padding or 0) - 1):
        # No padding token: positions may count what is none.
        ids = torch.full((1, max(tokens, 1)), 0 if padding else 1, dtype=torch.int64)
        try:
            run_reference(model, input_ids=ids)
        except CheckpointError:
            continue
        return tokens
    raise ExportError(
        f"{type(model).__name__}: its config states a context of {stated} tokens, and PyTorch "
        "itself cannot run so many"
    )


def _references(
    model: Any, plan: ParityPlan, beside: Sequence[ExportedHead]
) -> list[HeadReference]:
    logits = tuple({"logits": rows} for rows in reference_logits(model, plan))
    rows = list(zip(plan.token_ids, plan.scored, strict=True))
    others = reference_heads(model, rows, {head.name: head.reference for head in beside})
    return [HeadReference(MASKED_HEAD, logits), *others]


def _prove(bundle: Bundle, plan: ParityPlan, references: Sequence[HeadReference]) -> ParityReport:
    """Run the written files in every way and compare.

    Raises:
        ParityError: If an answer differs by more than rounding explains.
    """
    measured = {}
    try:
        runner = EncoderRunner(bundle)
        for name, run in _CASES.items():
            hidden = run(runner, plan)
            states = [
                np.ascontiguousarray(rows[scored])
                for rows, scored in zip(hidden, plan.scored, strict=True)
            ]
            measured[name] = measure_heads(bundle, runner, references, states)
    except RunError as error:
        raise ParityError(f"cannot run the written files: {error}") from error
    heads = compare_heads(references, measured, RELATIVE[bundle.manifest.model.dtype])
    check_heads(heads)
    return ParityReport(
        cases={},
        limit=0.0,
        positions=sum(len(scored) for scored in plan.scored),
        max_abs_logit=references[0].largest,
        pieces=1,
        heads=heads,
    )


def _together(runner: EncoderRunner, plan: ParityPlan) -> list[Float32]:
    lengths = np.array([len(row) for row in plan.token_ids])
    ids = np.zeros((len(lengths), int(lengths.max())), np.int64)
    for b, row in enumerate(plan.token_ids):
        ids[b, : len(row)] = row
    hidden = runner.encode(ids, lengths)
    return [hidden[b, :n] for b, n in enumerate(lengths)]


def _alone(runner: EncoderRunner, plan: ParityPlan) -> list[Float32]:
    return [runner.encode(row[None], np.array([len(row)]))[0] for row in plan.token_ids]


_CASES: dict[str, Callable[[EncoderRunner, ParityPlan], list[Float32]]] = {
    "texts_of_different_lengths": _together,
    "alone": _alone,
}
