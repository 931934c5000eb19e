"""Checks on the written files themselves, before anything runs them."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from headport.bundle import Bundle
from headport.cache_ports import free_dimensions
from headport.errors import ExportError

__all__ = ["check_written"]


def check_written(bundle: Bundle) -> None:
    """Check every graph with the ONNX checker, and the backbone's dimensions.

    Raises:
        ExportError: If a graph is not valid ONNX, or a dimension that callers vary is fixed.
    """
    for name, graph in bundle.manifest.graphs.items():
        file = bundle.path / graph.file
        try:
            onnx.checker.check_model(str(file), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise ExportError(f"graph {name} is not valid ONNX: {error}") from error
        if graph.role == "backbone":
            _check_dimensions(file)


def _check_dimensions(file: Path) -> None:
    graph = ir.load(file).graph
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
    if name in ("input_ids", "hidden_states"):
        return {0: "batch", 1: "sequence"}
    return free_dimensions(name)
