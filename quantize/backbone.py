"""Quantising the backbone of a bundle: its matrices, and its input embedding."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.bundle import Bundle, draft_bundle
from headport.errors import QuantizeError
from headport.graphs import add_stage, load_graphs, rewrite_bundle
from headport.head_parts import all_parts, with_heads
from headport.ledger import find_tensor, head_weight
from headport.lowering.matrices import Matrix, Table, find_matrices, find_tables
from headport.manifest import BackboneQuantization, Head, Manifest, StoredMatrix, Tensor
from headport.progress import track
from headport.quantize.backbone_check import check_backbone, check_lookups
from headport.quantize.backbone_pass import store_matrix
from headport.quantize.backbone_plan import BackboneRequest, plan_matrices, stored_text
from headport.quantize.backbone_report import Stored, backbone_report
from headport.quantize.embedding_pass import store_table
from headport.quantize.formats import FORMATS
from headport.quantize.spool import Spool
from headport.selftest import write_selftest

__all__ = ["checked_weight", "described_head", "quantizable_backbone", "quantize_backbone"]

_LARGEST_HALF = 65504.0  # of float16
_SHOWN = 8  # rows named in a message


def quantize_backbone(
    bundle: Path, output: Path, request: BackboneRequest, *, force: bool = False
) -> Bundle:
    """Store a backbone's matrices, and its input embedding, in fewer bits.

    Args:
        bundle: Portable bundle to read.
        output: Bundle to write.
        request: What is asked.
        force: Replace an existing bundle.

    Raises:
        QuantizeError: If the bundle is lowered, its backbone is quantised already, a pattern fits
            nothing, or a matrix cannot be stored as asked.
        OutputError: If the output cannot be written.
        ParityError: If a written matrix does not multiply as it should.
    """
    source = Bundle.open(bundle)
    source.require_decoder_only(
        "quantising its backbone or embedding", "quantise its head with --head alone"
    )
    graph = quantizable_backbone(source)
    with draft_bundle(output, force=force) as draft:
        models = load_graphs(source)
        model = models[graph]
        matrices, left = find_matrices(model)
        plan = plan_matrices([m.name for m in matrices], request, left)
        left |= {table.name: "looked up by token id" for table in find_tables(model)}
        tables = _tables(source, model, request)
        if not plan and not tables:
            raise QuantizeError(f"{bundle}: its backbone has no matrix that products alone read")
        with tempfile.TemporaryDirectory(prefix=".quantize.", dir=draft.path.parent) as folder:
            spool = Spool(Path(folder))
            stored = _store_matrices(model, matrices, plan, spool)
            lookups = _store_tables(model, tables, request.embedding, spool)
            manifest = rewrite_bundle(source, models, draft.path)
        record = BackboneQuantization(
            matrices=plan,
            embedding=dict.fromkeys(lookups, request.embedding) if request.embedding else {},
            activations=request.activations,
        )
        heads = {
            name: described_head(source.manifest, manifest, head, graph)
            for name, head in all_parts(manifest).items()
        }
        changed = msgspec.structs.replace(manifest, backbone_quantization=record)
        changed = with_heads(changed, heads)
        preview = draft.preview(changed)
        report = backbone_report(
            source,
            preview,
            stored | lookups,
            _left(left, matrices, stored | lookups),
            (
                check_backbone(source, preview, graph, matrices, plan),
                check_lookups(source, preview, graph, tables, record.embedding),
            ),
        )
        manifest = write_selftest(preview)
        return draft.commit(add_stage(manifest, "quantize", _chosen(request), asdict(report)))


def _left(
    others: Mapping[str, str], matrices: Sequence[Matrix], done: Mapping[str, Stored]
) -> dict[str, str]:
    reasons = {**others, **{matrix.name: "not asked for" for matrix in matrices}}
    return {name: reason for name, reason in reasons.items() if name not in done}


def quantizable_backbone(bundle: Bundle) -> str:
    """Name of the graph whose matrices can be stored in fewer bits.

    Raises:
        QuantizeError: If the bundle is lowered, or its backbone is quantised already.
    """
    manifest = bundle.manifest
    if manifest.target != "portable":
        raise QuantizeError(
            f"{bundle.path} is lowered to {manifest.target}; quantise the portable bundle it was "
            "made from, then lower again"
        )
    if manifest.backbone_quantization is not None:
        raise QuantizeError(
            f"{bundle.path}: the backbone is quantised already; "
            "quantise the bundle it was made from"
        )
    return manifest.backbone_name


def _tables(bundle: Bundle, model: ir.Model, request: BackboneRequest) -> list[Table]:
    if request.embedding is None:
        return []
    tables = find_tables(model)
    if not tables:
        raise QuantizeError(
            f"{bundle.path}: nothing but a lookup by token id was expected to read "
            "the input embedding; leave --embedding out"
        )
    return tables


def _store_matrices(
    model: ir.Model, matrices: Sequence[Matrix], plan: Mapping[str, StoredMatrix], spool: Spool
) -> dict[str, Stored]:
    done = {}
    chosen = [matrix for matrix in matrices if matrix.name in plan]
    for matrix in track(chosen, "rounding the backbone", unit="matrix"):
        how = plan[matrix.name]
        weight = checked_weight(matrix.value, matrix.name, how, rows_first=matrix.rows_first)
        stored = FORMATS[how.format].store(weight, how.block or 0, None)
        done[matrix.name] = Stored(how, matrix.value.const_value.nbytes, stored)  # type: ignore
        store_matrix(model, matrix, spool.keep(stored), FORMATS[how.format], how.block or 0)
    return done


def _store_tables(
    model: ir.Model, tables: Sequence[Table], how: StoredMatrix | None, spool: Spool
) -> dict[str, Stored]:
    done = {}
    for table in tables:
        assert how is not None
        weight = checked_weight(table.value, table.name, how, rows_first=True)
        stored = FORMATS[how.format].store(weight, how.block or 0, None)
        done[table.name] = Stored(how, table.value.const_value.nbytes, stored)  # type: ignore
        store_table(model, table, spool.keep(stored), how)
    return done


def checked_weight(
    value: ir.Value, name: str, how: StoredMatrix, *, rows_first: bool
) -> npt.NDArray[Any]:
    """A weight, outputs first.

    Raises:
        QuantizeError: If it holds what cannot be stored, naming the outputs.
    """
    assert value.const_value is not None
    if how.format == "fp16" and value.dtype == ir.DataType.FLOAT16:
        raise QuantizeError(f"{name} is stored as float16 already; leave it out")
    array = value.const_value.numpy()
    weight = array if rows_first else array.T
    if weight.dtype not in (np.float32, np.float16):
        weight = weight.astype(np.float32)
    if how.format == "fp16":
        _refuse(name, ~(np.abs(weight) <= _LARGEST_HALF), "what float16 cannot hold", "int8")
    _refuse(name, ~np.isfinite(weight), "NaN or infinity", None)
    return weight


def _refuse(name: str, wrong: npt.NDArray[np.bool_], what: str, instead: str | None) -> None:
    rows = np.flatnonzero(wrong.any(axis=1))
    if len(rows):
        more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        advice = f"use {instead} for it" if instead else "repair the checkpoint"
        named = ", ".join(map(str, rows[:_SHOWN]))
        raise QuantizeError(f"{name} holds {what} in the weights of output {named}{more}; {advice}")


def described_head(before: Manifest, after: Manifest, head: Head, backbone: str) -> Head:
    """A head's entry as the ledger has its weight now, which the embedding may share or not.

    Args:
        before: Of the bundle that was changed.
        after: With the written graphs and ledger.
        head: Its entry before.
        backbone: The graph that reads the embedding.
    """
    _, initializer = head_weight(before, head)
    entry = find_tensor(after, head.graph, initializer)
    changed = msgspec.structs.replace(head, weight=entry.name, tied=_reads(backbone, entry))
    if (form := head.candidates) is None:
        return changed
    old = next(t for t in before.tensors if t.name == form.original and _reads(form.full, t))
    consumer = next(c for c in old.consumers if c.startswith(f"{form.full}:"))
    new = find_tensor(after, form.full, consumer.partition(":")[2])
    tied = _reads(backbone, new)
    original = msgspec.structs.replace(form, original=new.name, original_tied=tied)
    return msgspec.structs.replace(changed, candidates=original)


def _reads(graph: str, tensor: Tensor) -> bool:
    return any(consumer.startswith(f"{graph}:") for consumer in tensor.consumers)


def _chosen(request: BackboneRequest) -> dict[str, Any]:
    chosen: dict[str, Any] = {"backbone": stored_text(request.matrices)}
    if request.overrides:
        chosen["override"] = [f"{o.pattern}={stored_text(o.stored)}" for o in request.overrides]
    if request.embedding:
        chosen["embedding"] = stored_text(request.embedding)
    return chosen | {"backbone_activations": request.activations}
