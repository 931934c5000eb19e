"""Checks on the written files themselves, before anything runs them."""

from __future__ import annotations

from collections import Counter

import onnx
import onnx_ir as ir

from headport.bundle import Bundle
from headport.cache_ports import SOURCE_MASK, free_dimensions
from headport.errors import ExportError
from headport.given_rows import EMBEDDING_ROWS, EMBEDDINGS
from headport.manifest import Tensor

__all__ = ["check_written"]

_PAGE_BYTES = 4096  # tensors start on one at the latest


def check_written(bundle: Bundle) -> None:
    """Check every graph with the ONNX checker, the backbone's dimensions, and every byte of data.

    Raises:
        ExportError: If a graph is not valid ONNX, a dimension that callers vary is fixed, a node
            has no name of its own, or a data file holds bytes that belong to no tensor.
    """
    for name, graph in bundle.manifest.graphs.items():
        file = bundle.path / graph.file
        try:
            onnx.checker.check_model(str(file), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise ExportError(f"graph {name} is not valid ONNX: {error}") from error
        model = ir.load(file)
        _check_names(model.graph, name)
        if graph.role == "backbone":
            _check_dimensions(model.graph)
    _check_bytes(bundle)


def _check_names(graph: ir.Graph, name: str) -> None:
    seen = Counter(node.name for node in graph)
    if faults := sorted(str(n) for n, count in seen.items() if not n or count > 1):
        raise ExportError(f"graph {name} has nodes without a name of their own: {faults}")


def _check_bytes(bundle: Bundle) -> None:
    # Tensors in order of their place; between them only zeros, less than a page.
    files: dict[str, list[Tensor]] = {}
    for tensor in bundle.manifest.tensors:
        files.setdefault(tensor.file, []).append(tensor)
    present = {p.relative_to(bundle.path).as_posix() for p in (bundle.path / "data").iterdir()}
    if odd := sorted(present ^ files.keys()):
        raise ExportError(f"data files and tensor ledger do not agree on {', '.join(odd)}")
    for name, tensors in files.items():
        end = 0
        with (bundle.path / name).open("rb") as stream:
            for tensor in sorted(tensors, key=lambda t: t.offset):
                gap = tensor.offset - end
                stream.seek(end)
                if not 0 <= gap < _PAGE_BYTES or any(stream.read(gap)):
                    raise ExportError(
                        f"{name}: bytes {end} to {tensor.offset} belong to no tensor or to two"
                    )
                end = tensor.offset + tensor.length
        size = (bundle.path / name).stat().st_size
        if size != end:
            raise ExportError(f"{name}: {end} bytes of tensors expected, {size} found")


def _check_dimensions(graph: ir.Graph) -> None:
    faults = []
    for value in (*graph.inputs, *graph.outputs):
        assert value.name is not None
        found = [d if isinstance(d, int) else d.value for d in value.shape or ()]
        expected = _free_dimensions(value.name)
        for axis, symbol in expected.items():
            if axis >= len(found) or found[axis] != symbol:
                faults.append(f"{value.name} {found}, axis {axis} must be {symbol!r}")
    if faults:
        raise ExportError("the written backbone has fixed dimensions: " + "; ".join(faults))


def _free_dimensions(name: str) -> dict[int, str]:
    if name == "attention_mask":
        return {0: "batch", 1: "total_sequence"}
    if name in ("input_ids", "hidden_states", EMBEDDING_ROWS):
        return {0: "batch", 1: "sequence"}
    if name == EMBEDDINGS:
        return {0: "given"}
    if name == SOURCE_MASK:
        return {0: "source_batch", 1: "source"}
    return free_dimensions(name)
