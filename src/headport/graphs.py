"""Reading and writing a bundle's graphs: `.onnx` files beside `data/*.bin`, each tensor once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from headport.bundle import Bundle
from headport.errors import BundleError
from headport.manifest import Graph, Port, Tensor

__all__ = ["INLINE_BYTES", "graph_entry", "load_graphs", "write_graphs"]

INLINE_BYTES = 1024  # smaller tensors stay inside the .onnx file
_PAGE_BYTES = 4096  # ONNX Runtime maps external data page-wise; large tensors start on a page


def load_graphs(bundle: Bundle) -> dict[str, ir.Model]:
    """All graphs of a bundle by name; tensors stay on disk until they are read."""
    return {
        name: ir.load(bundle.file(graph.file)) for name, graph in bundle.manifest.graphs.items()
    }


def write_graphs(
    models: Mapping[str, ir.Model], files: Mapping[str, str], folder: Path
) -> tuple[Tensor, ...]:
    """Write graphs and their tensors into an empty bundle folder.

    Equal tensors (same bytes, dtype and shape) are stored once, also across graphs; tensors that
    more than one graph reads lie in `data/shared.bin`, the others in `data/<graph>.bin`. Tensors
    are written one at a time. The models' initialisers point to the written files afterwards.

    Args:
        models: Graph name → model.
        files: Graph name → file name, such as `backbone.onnx`.
        folder: The bundle's folder.

    Returns:
        The tensor ledger.
    """
    owners: dict[tuple[str, str, tuple[int, ...]], list[tuple[str, ir.Value]]] = {}
    for graph_name, model in models.items():
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is None:
                raise BundleError(f"{graph_name}: initialiser {value.name} has no value")
            if tensor.nbytes >= INLINE_BYTES:
                shape = tuple(tensor.shape.numpy())
                key = (hashlib.sha256(_bytes(tensor)).hexdigest(), tensor.dtype.name, shape)
                owners.setdefault(key, []).append((graph_name, value))
    (folder / "data").mkdir()
    offsets: dict[str, int] = {}
    ledger = []
    for (sha256, dtype, shape), uses in owners.items():
        graph_names = {graph for graph, _ in uses}
        stem = "shared" if len(graph_names) > 1 else next(iter(graph_names))
        location = f"data/{stem}.bin"
        tensor = uses[0][1].const_value
        assert tensor is not None
        align = _PAGE_BYTES if tensor.nbytes >= _PAGE_BYTES else 64
        offset = -(-offsets.get(location, 0) // align) * align
        with (folder / location).open("ab") as stream:
            stream.write(b"\0" * (offset - stream.tell()))
            length = stream.write(_bytes(tensor))
        offsets[location] = offset + length
        for _, value in uses:
            value.const_value = ir.ExternalTensor(
                location,
                offset,
                length,
                tensor.dtype,
                shape=ir.Shape(shape),
                name=value.name or "",
                base_dir=folder,
            )
        ledger.append(
            Tensor(
                name=uses[0][1].name or "",
                sha256=sha256,
                dtype=dtype.lower(),
                shape=shape,
                file=location,
                offset=offset,
                length=length,
                consumers=tuple(f"{graph}:{value.name}" for graph, value in uses),
            )
        )
    for name, model in models.items():
        ir.save(model, folder / files[name])
    return tuple(ledger)


def _bytes(tensor: ir.TensorProtocol) -> bytes:
    return tensor.tobytes()


def graph_entry(model: ir.Model, file: str, role: str) -> Graph:
    """The manifest's entry of a graph: its file, role, and ports as the graph declares them."""
    assert role in ("backbone", "encoder", "head")
    return Graph(
        file=file,
        role=role,  # type: ignore[arg-type]
        inputs=tuple(_port(value) for value in model.graph.inputs),
        outputs=tuple(_port(value) for value in model.graph.outputs),
    )


def _port(value: ir.Value) -> Port:
    if value.shape is None or value.dtype is None:
        raise BundleError(f"graph port {value.name} has no declared type or shape")
    dims = tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)
    return Port(name=value.name or "", dtype=value.dtype.name.lower(), shape=dims)
