"""What every export writes alike: graphs with one ledger, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.bundle import Draft
from headport.export.checkpoint import Checkpoint, checkpoint_sha256
from headport.export.description import library_versions
from headport.export.hygiene import check_constants
from headport.export.names import note_provenance
from headport.graphs import graph_entry, write_graphs
from headport.head_parts import all_parts, with_heads
from headport.manifest import Head, Manifest, Provenance, Stage, Tensor
from headport.progress import bar

__all__ = [
    "SESSION_OPTIONS",
    "export_phases",
    "find_provenance",
    "with_export_stage",
    "write_draft",
]

# ONNX Runtime otherwise rounds activations to INT8 where it fuses DequantizeLinear and MatMul.
SESSION_OPTIONS = {"session.qdq_matmulnbits_accuracy_level": "0"}
_PHASES = 5


@contextmanager
def export_phases() -> Iterator[Callable[[str], None]]:
    """A progress bar; what it yields begins the next phase by name."""
    with bar(_PHASES, "export", "step") as progress:
        started = False

        def begin(name: str) -> None:
            nonlocal started
            progress.update(int(started))
            started = True
            progress.set_description(f"export: {name}")

        yield begin
        progress.update()


def find_provenance(checkpoint: Checkpoint) -> Provenance:
    """Where the weights come from; no stage yet."""
    return Provenance(
        checkpoint=checkpoint.name,
        format=checkpoint.format,
        sha256=checkpoint_sha256(checkpoint),
        stages=(),
    )


def write_draft(
    manifest: Manifest,
    graphs: Mapping[str, ir.Model],
    draft: Draft,
    arrays: Mapping[str, npt.NDArray[Any]],
) -> Manifest:
    """Write graphs, their tensors and arrays beside them; returns the manifest with both.

    Args:
        manifest: Its heads name their weights as their graphs do.
        graphs: By name; the first part of a name is its role.
        draft: The bundle in the making.
        arrays: By file name.

    Raises:
        ExportError: If a constant is NaN or infinite.
    """
    origin = manifest.provenance
    for graph in graphs.values():
        note_provenance(graph, origin.checkpoint, origin.sha256, manifest.model.dtype)
        check_constants(graph)
    files = {name: f"{name}.onnx" for name in graphs}
    tensors = write_graphs(graphs, files, draft.path)
    for name, array in arrays.items():
        np.save(draft.path / name, array)
    entries = {
        name: graph_entry(graph, files[name], name.split(".")[0]) for name, graph in graphs.items()
    }
    written = msgspec.structs.replace(manifest, graphs=entries, tensors=tensors)
    # Equal tensors are stored once, under the name of their first use.
    heads = {
        name: msgspec.structs.replace(head, weight=_ledger_name(tensors, head))
        for name, head in all_parts(manifest).items()
    }
    return with_heads(written, heads)


def _ledger_name(tensors: tuple[Tensor, ...], head: Head) -> str:
    consumer = f"{head.graph}:{head.weight}"
    return next((t.name for t in tensors if consumer in t.consumers), head.weight)


def with_export_stage(
    manifest: Manifest, options: dict[str, Any], report: dict[str, Any]
) -> Manifest:
    """The manifest with its first stage.

    Args:
        manifest: Of the finished bundle.
        options: What was asked for.
        report: What was measured.
    """
    stage = Stage(stage="export", options=options, versions=library_versions(), report=report)
    provenance = msgspec.structs.replace(manifest.provenance, stages=(stage,))
    return msgspec.structs.replace(manifest, provenance=provenance)
