"""What a rule is, what it looks at, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.bundle import Bundle
from headport.manifest import Manifest

__all__ = [
    "BundleRule",
    "Finding",
    "GraphRule",
    "Place",
    "Severity",
    "Subject",
    "constant_of",
    "nodes_of",
    "place_of",
]

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Place:
    """Where a rule is broken: a node as the graph names it, and what was found there."""

    node: str
    found: str


@dataclass(frozen=True)
class GraphRule:
    """One row: what one graph must not hold."""

    name: str
    check: Callable[[ir.Model], Iterator[Place]]
    why: str  # what the target does with it
    cure: str  # the option that avoids it
    # How TensorRT-RTX 1.7 answers: codes of its parser, `builder` where no plan comes, or `silent`
    # for one that is built all the same.
    answers: tuple[str, ...]
    severity: Severity = "error"


@dataclass(frozen=True)
class Subject:
    """A bundle as a target would get it."""

    bundle: Bundle  # as it was opened
    manifest: Manifest
    models: dict[str, ir.Model]  # graph name → graph, lowered to the target


@dataclass(frozen=True)
class BundleRule:
    """One row: what a whole bundle must not be."""

    name: str
    check: Callable[[Subject], Iterator[tuple[str, Place]]]  # (graph, place)
    why: str
    cure: str
    targets: tuple[str, ...]
    severity: Severity = "warning"


@dataclass(frozen=True)
class Finding:
    """One broken rule at one place."""

    rule: str
    severity: Severity
    graph: str
    node: str
    found: str
    why: str
    cure: str

    def __str__(self) -> str:
        return (
            f"{self.severity}  {self.graph}: {self.node}: {self.found} [{self.rule}]\n"
            f"         {self.why}; {self.cure}"
        )


def nodes_of(model: ir.Model, *op_types: str, domain: str = "") -> Iterator[ir.Node]:
    """Nodes of these types, also in subgraphs and functions; all of them without a type."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for node in graph.all_nodes():
            if not op_types or (node.op_type in op_types and node.domain == domain):
                yield node


def place_of(node: ir.Node, found: str) -> Place:
    """A place at a node."""
    outputs = [value.name for value in node.outputs if value.name]
    return Place(node.name or (outputs[0] if outputs else None) or node.op_type, found)


def constant_of(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """A value as an array where it is a constant, given as initialiser or by a Constant node."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else np.asarray(tensor.numpy())
