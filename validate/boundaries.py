"""Where the layers of a backbone's graph begin and end, and copies of it that show these places.

Lowerings rename and fuse, so nothing is looked up by name. The state between two layers is the
one value through which everything from token ids to hidden states passes there:

    ids ─ embedding ─┬─ norm ─ attention ─ + ─┬─ norm ─ mlp ─ + ─┬─ … ─ norm ─ hidden_states
                     └─────────────────────┘  └────────────┘
                     ^ into layer 0                               ^ into layer 1

and attention belongs to the layer whose cache it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.cache_ports import is_present
from headport.kernels import PRODUCT, SKIP, SUM

__all__ = ["Boundary", "boundaries_of", "write_exposed"]

Float32 = npt.NDArray[np.float32]

_HIDDEN, _IDS = "hidden_states", "input_ids"
# They say how many tokens there are, nothing about which.
_SIZES_ONLY = frozenset({"Shape", "Size", "Positions"})
# A sum and the norm behind it in one operator, by which of its outputs is the sum, which goes on to
# the next, and which of its inputs are added. An own product has a norm only where it was fused.
_SUM_AND_NORM = {
    "SkipSimplifiedLayerNormalization": (3, (0, 1)),
    "SkipLayerNormalization": (3, (0, 1)),
    PRODUCT: (SUM, (0, SKIP)),
}


@dataclass(frozen=True)
class Boundary:
    """A place between layers."""

    layer: int | None  # whose input it is; None: the output of the last
    node: ir.Node  # computes the state
    terms: tuple[ir.Value | None, ...]  # what the node reads, whatever is put in their place

    @property
    def fused(self) -> bool:
        """Whether the node computes the sum and its norm at once."""
        return _is_fused(self.node)

    @property
    def value(self) -> ir.Value:
        """The state [batch, sequence, H]."""
        return self.node.outputs[_SUM_AND_NORM[self.node.op_type][0] if self.fused else 0]

    @property
    def added(self) -> tuple[int, int]:
        """Of a fused node, which of its inputs it adds."""
        return _SUM_AND_NORM[self.node.op_type][1]


def boundaries_of(file: Path) -> list[Boundary]:
    """The places between layers in the order of the layers; none where streams run in parallel.

    Layers without a cache of their own are not told from the one before them.

    Args:
        file: A backbone, portable or lowered.
    """
    return _find(ir.load(file))


def write_exposed(file: Path, target: Path, pinned: Float32 | None) -> None:
    """Write a copy whose `hidden_states` hold the states of all boundaries side by side.

    Its own hidden states follow them: [batch, sequence, (boundaries + 1) · H].

    Args:
        file: A backbone with boundaries.
        target: The copy, beside the same data.
        pinned: [boundaries, T, H] for one row of T tokens: every layer starts from these states
            instead of what the one before it gave; None: nothing is replaced.
    """
    model = ir.load(file)
    boundaries = _find(model)
    if pinned is not None:
        _pin(model, boundaries, pinned)
    _expose(model, boundaries)
    ir.save(model, target)


def _find(model: ir.Model) -> list[Boundary]:
    order = {node: place for place, node in enumerate(model.graph)}
    writers: dict[int, int] = {}  # layer → place of the first node that writes its cache
    for output in model.graph.outputs:
        node = output.producer()
        if is_present(output.name or "") and node is not None:
            layer = int(str(output.name).split(".")[1])
            writers[layer] = min(writers.get(layer, order[node]), order[node])
    cuts = [node for node in _cuts(model) if _is_fused(node) or _gives_one(node)]
    found = []
    for layer, place in sorted(writers.items()):
        before = [node for node in cuts if order[node] < place]
        if not before:
            return []
        found.append(_boundary(layer, before[-1]))
    last = max(writers.values(), default=0)
    behind = [node for node in cuts if order[node] > last and _is_sum(node)]
    found += [_boundary(None, behind[-1])] if behind else []
    return found if len({id(b.node) for b in found}) == len(found) else []


def _is_fused(node: ir.Node) -> bool:
    place = _SUM_AND_NORM[node.op_type][0] if node.op_type in _SUM_AND_NORM else len(node.outputs)
    return place < len(node.outputs) and bool(node.outputs[place].name)


def _gives_one(node: ir.Node) -> bool:
    # The norm alone of a sum that goes nowhere is no state.
    return len(node.outputs) == 1 and node.op_type not in _SUM_AND_NORM.keys() - {PRODUCT}


def _is_sum(node: ir.Node) -> bool:
    # A plain sum that gives the hidden states themselves is the bias of the final norm.
    plain = node.op_type == "Add" and node.outputs[0].name != _HIDDEN
    return plain or _is_fused(node)


def _boundary(layer: int | None, node: ir.Node) -> Boundary:
    return Boundary(layer, node, tuple(node.inputs))


def _cuts(model: ir.Model) -> Iterator[ir.Node]:
    """Nodes through which everything from ids to hidden states passes, in order."""
    hidden = next(value for value in model.graph.outputs if value.name == _HIDDEN)
    active = _ways(model, hidden)
    uses: dict[ir.Value, int] = {hidden: 1}
    for node in active:
        for value in _read(node):
            uses[value] = uses.get(value, 0) + 1
    waiting: dict[ir.Value, int] = {}  # values computed so far that are read later on
    for node in active:
        for value in _read(node):
            if value in waiting:
                waiting[value] -= 1
                if not waiting[value]:
                    del waiting[value]
        waiting |= {value: uses[value] for value in node.outputs if value in uses}
        if waiting and all(value.producer() is node for value in waiting):
            yield node


def _ways(model: ir.Model, hidden: ir.Value) -> list[ir.Node]:
    """Nodes on a way from the token ids to the hidden states, in order."""
    fed = {value for value in model.graph.inputs if value.name == _IDS}
    reached = []
    for node in model.graph:
        if node.op_type not in _SIZES_ONLY and any(value in fed for value in _read(node)):
            fed.update(node.outputs)
            reached.append(node)
    needed, found = {hidden}, []
    for node in reversed(reached):
        if any(value in needed for value in node.outputs):
            needed.update(_read(node))
            found.append(node)
    return found[::-1]


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """Values that a node reads, those that its subgraphs capture included; each once."""
    values = {value for value in node.inputs if value is not None}
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                values.update(_read(inner))
    yield from values


def _expose(model: ir.Model, boundaries: Sequence[Boundary]) -> None:
    graph = model.graph
    place = next(i for i, value in enumerate(graph.outputs) if value.name == _HIDDEN)
    hidden = graph.outputs[place]
    dtype = hidden.dtype or ir.DataType.FLOAT
    hidden.name = f"{_HIDDEN}.alone"
    parts = []
    for boundary in boundaries:
        state = boundary.value
        if boundary.fused:  # its own output may be pinned with its inputs; this sum is not
            total = ir.node("Add", [boundary.terms[place] for place in boundary.added])
            graph.append(total)
            state = total.outputs[0]
        cast = ir.node("Cast", [state], attributes={"to": dtype.value})
        graph.append(cast)
        parts.append(cast.outputs[0])
    joined = ir.node("Concat", [*parts, hidden], attributes={"axis": -1})
    graph.append(joined)
    joined.outputs[0].name = _HIDDEN
    joined.outputs[0].dtype = dtype
    graph.outputs[place] = joined.outputs[0]


def _pin(model: ir.Model, boundaries: Sequence[Boundary], states: Float32) -> None:
    hidden = next(value for value in model.graph.outputs if value.name == _HIDDEN)
    for index, (boundary, state) in enumerate(zip(boundaries, states, strict=True)):
        dtype = boundary.value.dtype or hidden.dtype or ir.DataType.FLOAT
        fixed = _initializer(model.graph, f"headport.pinned.{index}", state[None], dtype)
        if not boundary.fused:
            for use in list(boundary.value.uses()):
                use.node.replace_input_with(use.idx, fixed)
            continue
        zero = _initializer(model.graph, f"headport.zero.{index}", 0 * state[None], dtype)
        for place, value in zip(boundary.added, (fixed, zero), strict=True):
            boundary.node.replace_input_with(place, value)


def _initializer(graph: ir.Graph, name: str, data: Float32, dtype: ir.DataType) -> ir.Value:
    tensor = ir.Tensor(data.astype(dtype.numpy()), dtype=dtype, name=name)
    value = ir.Value(
        name=name, shape=ir.Shape(data.shape), type=ir.TensorType(dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value
