"""Learned positions: whether the tables reach as far as the context that is promised."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from headport.errors import ExportError
from headport.export.functions import DOMAIN, POSITIONS
from headport.lowering.emit import attribute
from headport.lowering.subgraphs import run_between

__all__ = ["check_position_tables"]


def check_position_tables(model: ir.Model, max_context: int) -> None:
    """Refuse a context that a table of positions does not reach.

    No parity run is long enough to meet the end of a table, and reading past it is an error only
    in some runtimes.

    Args:
        model: A traced backbone.
        max_context: Tokens.

    Raises:
        ExportError: If the last position reads a row that a table does not have.
    """
    for call in model.graph:
        if (call.domain, call.op_type) != (DOMAIN, POSITIONS):
            continue
        for node in model.graph:
            if node.op_type != "Gather" or node.domain or attribute(node, "axis", 0) != 0:
                continue
            table, places = node.inputs[:2]
            if table is not None and places is not None and table.is_initializer():
                _check(model.graph, call.outputs[0], table, places, max_context)


def _check(
    graph: ir.Graph, positions: ir.Value, table: ir.Value, places: ir.Value, max_context: int
) -> None:
    if places is positions:
        last = max_context - 1
    else:
        places.type = places.type or ir.TensorType(ir.DataType.INT64)
        found = run_between(graph, positions, [places], [np.array([[0, max_context - 1]])])
        if found is None:
            return  # looked up by something else, such as token ids
        last = int(found[0][0].max())
    assert table.shape is not None
    rows = int(table.shape.numpy()[0])
    if last >= rows:
        raise ExportError(
            f"{table.name}: a context of {max_context} tokens reads row {last} of a table of "
            f"positions with {rows} rows; state the context length that the model was made for"
        )
