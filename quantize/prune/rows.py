"""Rewriting graphs so that they hold the rows of some tokens only.

    head:      Gemm(x, W [V, H], b [V])            →  Gemm(x, W[kept], b[kept])
               DequantizeLinear(Q, S, Z), Cast     →  the same on kept rows, values bit for bit
               Gather(T [V, …], candidate ids)     →  Gather(T[kept], …)
    backbone:  Gather(E [V, H], input_ids)         →  Gather(E[kept], …), also of scales

Every tensor with a row per token is found by what reads it. One that is as wide as the vocabulary
and read in any other way is refused by its name: leaving it would be wrong without a sign.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.errors import QuantizeError
from headport.lowering.emit import attribute

__all__ = ["keep_head_rows", "keep_table_rows"]

Int64 = npt.NDArray[np.int64]

# Of `headport.quantize.candidates_pass`: lowest id of the rows that equal each row.
_EQUAL_ROWS = "certificate.equal_rows"


def keep_head_rows(model: ir.Model, kept: Int64, width: int) -> list[str]:
    """Leave a head the rows of some tokens.

    Args:
        model: The head's graph; changed in place.
        kept: Rows that stay, in their new order, [K].
        width: Rows that it has.

    Returns:
        The initialisers that were cut.

    Raises:
        QuantizeError: If a tensor has a row per token and it is not known how it is used.
    """
    graph = model.graph
    found = list(_head_tensors(graph))
    _refuse_unknown(graph, [v.name or "" for v in found], width)
    for value in found:
        _cut(value, kept, width, "the head")
    for node in graph:
        for value in node.outputs:
            _narrow(value, width, len(kept))
    return [value.name or "" for value in found]


def keep_table_rows(model: ir.Model, kept: Int64) -> list[str]:
    """Leave a backbone the input embeddings of some tokens.

    Args:
        model: The backbone; changed in place.
        kept: Ids that stay, in their new order, [K].

    Returns:
        The initialisers that were cut.

    Raises:
        QuantizeError: If token ids are used for anything but looking up rows.
    """
    graph = model.graph
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    found = {id(v): v for v in _tables(ids)}
    if not found:
        raise QuantizeError("the backbone looks nothing up by token id")
    for value in found.values():
        rows = int(value.const_value.shape.numpy()[0]) if value.const_value is not None else 0
        if rows <= kept.max():
            raise QuantizeError(
                f"{value.name} is looked up by token id and has {rows} rows, at least "
                f"{int(kept.max()) + 1} were expected"
            )
        _cut(value, kept, rows, "the input embedding")
    return [value.name or "" for value in found.values()]


def _head_tensors(graph: ir.Graph) -> Iterator[ir.Value]:
    for value in graph.initializers.values():
        if any(_per_token(use.node, use.idx) for use in value.uses()):
            yield value


def _per_token(node: ir.Node, place: int) -> bool:
    """Whether an operator reads one row per token at this place."""
    if node.op_type == "Gemm":
        return (place == 1 and attribute(node, "transB", 0) == 1) or place == 2
    if node.op_type == "Gather":
        return place == 0 and attribute(node, "axis", 0) == 0
    if node.op_type in ("DequantizeLinear", "Cast"):
        return any(_per_token(use.node, use.idx) for use in node.outputs[0].uses())
    return False


def _refuse_unknown(graph: ir.Graph, known: list[str], width: int) -> None:
    for value in graph.initializers.values():
        dims = value.const_value.shape.numpy() if value.const_value is not None else ()
        if value.name not in known and width in dims and width > 1:
            users = ", ".join(sorted({use.node.op_type for use in value.uses()})) or "nothing"
            raise QuantizeError(
                f"the head's {value.name} {list(dims)} may have a row per token, and is read by "
                f"{users}; such a head cannot be pruned"
            )


def _tables(value: ir.Value) -> Iterator[ir.Value]:
    """What is looked up by the ids in a value."""
    for use in value.uses():
        node = use.node
        if node.op_type in ("Cast", "Reshape", "Unsqueeze", "Squeeze") and use.idx == 0:
            yield from _tables(node.outputs[0])
        elif node.op_type == "Gather" and use.idx == 1:
            table = node.inputs[0]
            if table is None or table.const_value is None or attribute(node, "axis", 0) != 0:
                raise QuantizeError(f"{node.name} looks token ids up in what is no stored table")
            yield table
        elif node.op_type != "Shape" and node.domain != "headport":
            # `headport` functions take the ids for their shape.
            raise QuantizeError(
                f"the backbone gives token ids to {node.op_type} ({node.name}), whose outcome may "
                "depend on their values; use --mode output, which leaves the backbone as it is"
            )


def _cut(value: ir.Value, kept: Int64, width: int, what: str) -> None:
    tensor = value.const_value
    assert tensor is not None
    if len(tensor.shape) == 0 or tensor.shape.numpy()[0] != width:
        raise QuantizeError(
            f"{what}: {value.name} with {width} rows was expected, "
            f"{list(tensor.shape.numpy())} found"
        )
    if _only_looked_up(value) is False:
        raise QuantizeError(f"{what}: {value.name} is read in more than one way")
    rows = np.ascontiguousarray(tensor.numpy()[kept])
    if value.name == _EQUAL_ROWS:
        rows = _first_of_kept(rows)
    value.const_value = ir.tensor(rows, dtype=tensor.dtype, name=value.name)
    value.shape = ir.Shape(rows.shape)


def _only_looked_up(value: ir.Value) -> bool:
    return all(_per_token(use.node, use.idx) for use in value.uses())


def _first_of_kept(firsts: Int64) -> Int64:
    """The lowest new id of equal rows, from the lowest old one of each kept row."""
    _, place, group = np.unique(firsts, return_index=True, return_inverse=True)
    found: Int64 = place[group].astype(np.int64)
    return found


def _narrow(value: ir.Value, width: int, count: int) -> None:
    """Correct a declared width; where it is not an output's it is left to shape inference."""
    if value.shape is None or width not in [d for d in value.shape if isinstance(d, int)]:
        return
    if not value.is_graph_output():
        value.shape = None
        return
    dims: list[int | str | None] = [d if isinstance(d, int) else d.value for d in value.shape]
    dims[-1] = count
    value.shape = ir.Shape(dims)
