"""Writing new nodes into a graph, in front of the one they will replace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

__all__ = ["CONTRIB", "Emitter", "attribute", "made_by", "replace"]

CONTRIB = "com.microsoft"  # domain of ONNX Runtime's own operators


class Emitter:
    """Inserts nodes before `anchor`; constants are shared by the whole graph."""

    def __init__(self, graph: ir.Graph, anchor: ir.Node, prefix: str) -> None:
        self._graph = graph
        self._anchor = anchor
        self._prefix = prefix

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """A node with one output, called `<prefix>.<name>`."""
        return self.ops(op_type, inputs, (name,), domain=domain, **attributes)[0]

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        names: Sequence[str],
        *,
        domain: str = "",
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """A node with several outputs."""
        node = ir.node(
            op_type,
            inputs,
            attributes,
            domain=domain,
            num_outputs=len(names),
            name=f"{self._prefix}.{names[0]}.{op_type}",
        )
        for value, name in zip(node.outputs, names, strict=True):
            value.name = f"{self._prefix}.{name}"
        self._graph.insert_before(self._anchor, node)
        return node.outputs

    def ints(self, *values: int) -> ir.Value:
        """A one-dimensional int64 constant."""
        return self._constant(np.array(values, np.int64), f"ints.{'.'.join(map(str, values))}")

    def scalar(self, value: float, dtype: type[np.generic]) -> ir.Value:
        """A constant without dimensions."""
        return self._constant(np.array(value, dtype), f"{np.dtype(dtype).name}.{value}")

    def _constant(self, array: np.ndarray[Any, Any], name: str) -> ir.Value:
        name = f"headport.{name}"
        found = self._graph.initializers.get(name)
        if found is None:
            found = ir.val(name, const_value=ir.tensor(array, name=name))
            self._graph.register_initializer(found)
        return found


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """An attribute's value, or the operator's default."""
    return node.attributes[name].value if name in node.attributes else default


def made_by(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """The node that gives a value, if it is of this operator."""
    node = value.producer() if value is not None else None
    return node if node is not None and (node.domain, node.op_type) == (domain, op_type) else None


def replace(graph: ir.Graph, node: ir.Node, values: Sequence[ir.Value]) -> None:
    """Put `values` in place of a node's outputs, also as graph outputs, and drop the node."""
    for old, new in zip(node.outputs, values, strict=True):
        name = old.name
        new.type, new.shape = old.type or new.type, old.shape or new.shape
        is_output = old.is_graph_output()
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        if is_output:
            old.name = f"{name}.replaced"
            new.name = name
    graph.remove(node, safe=True)
