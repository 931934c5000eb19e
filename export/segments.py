"""A written graph cut into consecutive pieces that run one after the other, each alone in memory.

The pieces hold the written graph's own nodes, and read their weights from the written files; only
which of them are loaded at the same time differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from headport.errors import ExportError

__all__ = ["Segment", "split_graph"]


@dataclass
class Segment:
    """Consecutive nodes of a graph, as a model of their own."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, onnx.TensorProto] = field(default_factory=dict)
    data_bytes: int = 0  # of the weights

    def model(self, whole: onnx.ModelProto, types: dict[str, onnx.ValueInfoProto]) -> bytes:
        """The piece as a serialised model; lies beside the file it was cut from."""
        missing = [name for name in (*self.inputs, *self.outputs) if name not in types]
        if missing:
            raise ExportError(f"the graph gives no type for {', '.join(missing)}")
        graph = onnx.GraphProto(
            name=whole.graph.name,
            node=self.nodes,
            input=[types[name] for name in self.inputs],
            output=[types[name] for name in self.outputs],
            initializer=self.weights.values(),
        )
        piece = onnx.ModelProto(
            ir_version=whole.ir_version,
            opset_import=whole.opset_import,
            functions=whole.functions,
            graph=graph,
        )
        return bytes(piece.SerializeToString())


def split_graph(file: Path, limit_bytes: int) -> Iterator[tuple[Segment, bytes]]:
    """Cut a graph wherever its weights since the last cut would exceed a limit.

    Args:
        file: An `.onnx` file; nodes in topological order.
        limit_bytes: Of weights in one piece; a larger weight is a piece of its own.

    Returns:
        The pieces in order, each with its serialised model.

    Raises:
        ExportError: If a value that crosses a cut has no type.
    """
    whole = onnx.load(file, load_external_data=False)
    weights = {tensor.name: tensor for tensor in whole.graph.initializer}
    segments = list(_cut(whole.graph, weights, limit_bytes))
    wanted = {value.name for value in whole.graph.output}
    for segment in reversed(segments):
        made = {name for node in segment.nodes for name in node.output}
        segment.outputs = [n for node in segment.nodes for n in node.output if n in wanted]
        read = [name for node in segment.nodes for name in _reads(node)]
        segment.inputs = [n for n in dict.fromkeys(read) if n not in made and n not in weights]
        wanted |= set(segment.inputs)
    ports = (*whole.graph.value_info, *whole.graph.input, *whole.graph.output)
    types = {value.name: value for value in ports if value.type.tensor_type.elem_type}
    for segment in segments:
        yield segment, segment.model(whole, types)


def _cut(
    graph: onnx.GraphProto, weights: dict[str, onnx.TensorProto], limit_bytes: int
) -> Iterator[Segment]:
    current = Segment()
    for node in graph.node:
        new = {n: weights[n] for n in _reads(node) if n in weights and n not in current.weights}
        size = sum(_data_bytes(tensor) for tensor in new.values())
        if current.data_bytes and size and current.data_bytes + size > limit_bytes:
            yield current
            current = Segment()
            new = {n: weights[n] for n in _reads(node) if n in weights}
            size = sum(_data_bytes(tensor) for tensor in new.values())
        current.nodes.append(node)
        current.weights |= new
        current.data_bytes += size
    yield current


def _data_bytes(tensor: onnx.TensorProto) -> int:
    stored = {entry.key: entry.value for entry in tensor.external_data}
    return int(stored.get("length", 0))


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    # A body of a control operator reads values of the graph around it as well.
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            inside = {value.name for value in (*body.input, *body.initializer)}
            for inner in body.node:
                yield from (name for name in _reads(inner) if name not in inside)
                inside |= set(inner.output)
