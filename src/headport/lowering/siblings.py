"""Products that read the same rows, as one: query, key and value; gate and up.

    MatMul(x, A), MatMul(x, B), …            →  Split(MatMul(x, [A B …]))
    MatMulNBits(x, A, Sa), (x, B, Sb), …     →  Split(MatMulNBits(x, [A; B; …], [Sa; Sb; …]))

x is read, and where the kernel rounds it rounded, once. No sum runs across outputs, so each output
stays the product it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import onnx_ir as ir

from headport.kernels import DOMAIN, PRODUCT
from headport.lowering.emit import CONTRIB, Emitter, replace
from headport.lowering.match import Match

__all__ = ["INPUT", "OUTPUTS", "PARTS", "SUMS", "pack_siblings"]

PARTS = " | "  # stands between the names of weights that lie in one tensor
OUTPUTS = "headport.outputs"  # metadata of a packed product: how many outputs each part has

# Metadata of a product that runs on two rows for one: what it is a product of, and the sum of both.
INPUT, SUMS = "headport.input", "headport.sums"


@dataclass(frozen=True)
class _Kind:
    """An operator, and along which axis the outputs lie in each of its constants."""

    domain: str
    axes: tuple[int, ...]
    outputs: Callable[[ir.Node], int]


def _columns(node: ir.Node) -> int:
    weight = node.inputs[1]
    assert weight is not None and weight.shape is not None
    return int(weight.shape.numpy()[1])


def _counted(node: ir.Node) -> int:
    return int(node.attributes[_COUNTS].as_int())


_COUNTS = "N"  # the attribute that counts outputs
_KINDS = {
    "MatMul": _Kind("", (1,), _columns),
    "MatMulNBits": _Kind(CONTRIB, (0, 0), _counted),
    PRODUCT: _Kind(DOMAIN, (0, 0), _counted),
}


def pack_siblings(model: ir.Model) -> list[Match]:
    """Pack every group of two or more; a weight that anything else reads is left where it is."""
    matches = []
    for nodes in list(_groups(model.graph)):
        _pack(model.graph, nodes)
        what = f"{len(nodes)} × {nodes[0].op_type} of the same input"
        matches.append(Match("backbone", what, f"{nodes[0].op_type} + Split"))
    return matches


def _groups(graph: ir.Graph) -> Iterator[list[ir.Node]]:
    by_input: dict[int, list[ir.Node]] = {}
    for node in graph:
        if _packable(node):
            by_input.setdefault(id(node.inputs[0]), []).append(node)
    for nodes in by_input.values():
        for _, same in groupby(sorted(nodes, key=_form), key=_form):
            found = list(same)
            if len(found) > 1:
                order = {id(node): place for place, node in enumerate(graph)}
                yield sorted(found, key=lambda node: order[id(node)])


def _packable(node: ir.Node) -> bool:
    kind = _KINDS.get(node.op_type)
    if kind is None or node.domain != kind.domain or node.inputs[0] is None:
        return False
    constants = [value for value in node.inputs[1:] if value is not None]
    return len(constants) == len(kind.axes) and all(
        value.is_initializer()
        and not value.is_graph_output()
        and len(list(value.uses())) == 1
        and value.shape is not None
        and (node.op_type != "MatMul" or len(value.shape) == 2)
        for value in constants
    )


def _form(node: ir.Node) -> str:
    # What must agree: the operator, the types, and all attributes but the number of outputs.
    given = sorted((k, str(a.value)) for k, a in node.attributes.items() if k != _COUNTS)
    return str((node.op_type, given, [str(v.dtype) for v in node.inputs if v is not None]))


def _pack(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    first, kind = nodes[0], _KINDS[nodes[0].op_type]
    counts = [kind.outputs(node) for node in nodes]
    emit = Emitter(graph, first, first.outputs[0].name or first.op_type)
    constants = [
        _joined(graph, [node.inputs[place] for node in nodes], axis)
        for place, axis in enumerate(kind.axes, 1)
    ]
    attributes = {name: a.value for name, a in first.attributes.items()}
    if _COUNTS in attributes:
        attributes[_COUNTS] = sum(counts)
    whole = emit.op(
        first.op_type,
        [first.inputs[0], *constants],
        "packed",
        domain=kind.domain,
        **attributes,
    )
    _describe(whole, nodes, counts)
    parts = emit.ops(
        "Split",
        [whole, emit.ints(*counts)],
        [f"part.{place}" for place in range(len(nodes))],
        axis=-1,
    )
    for node, part in zip(nodes, parts, strict=True):
        stored = [value.name or "" for value in node.inputs[1:] if value is not None]
        replace(graph, node, [part])
        for name in stored:
            del graph.initializers[name]


def _describe(whole: ir.Value, nodes: Sequence[ir.Node], counts: Sequence[int]) -> None:
    node, part = whole.producer(), nodes[0].outputs[0]
    assert node is not None
    node.metadata_props[OUTPUTS] = " ".join(map(str, counts))
    if INPUT in nodes[0].metadata_props:
        node.metadata_props[INPUT] = nodes[0].metadata_props[INPUT]
        node.metadata_props[SUMS] = PARTS.join(each.metadata_props[SUMS] for each in nodes)
    whole.type = part.type
    if part.shape is not None:
        whole.shape = ir.Shape([*list(part.shape)[:-1], sum(counts)])


def _joined(graph: ir.Graph, values: Sequence[ir.Value | None], axis: int) -> ir.Value:
    """One constant of several, put together when it is written."""
    given = [value for value in values if value is not None]
    tensors = [value.const_value for value in given]
    shapes = [[int(d) for d in value.shape.numpy()] for value in given if value.shape is not None]
    dims = list(shapes[0])
    dims[axis] = sum(shape[axis] for shape in shapes)
    name = PARTS.join(value.name or "" for value in given)
    dtype = given[0].dtype
    assert dtype is not None and all(tensor is not None for tensor in tensors)

    def evaluate() -> ir.TensorProtocol:
        arrays = [tensor.numpy() for tensor in tensors if tensor is not None]
        return ir.Tensor(np.concatenate(arrays, axis), dtype=dtype, name=name)

    lazy = ir.LazyTensor(evaluate, dtype, ir.Shape(dims), name=name, cache=False)
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims), const_value=lazy)
    graph.register_initializer(value)
    return value
