"""Reading and writing a bundle's graphs: `.onnx` files beside `data/*.bin`, each tensor once."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir

from headport import __version__
from headport.bundle import Bundle, carried_files, copy_files
from headport.errors import BundleError
from headport.manifest import Graph, Manifest, Port, Stage, Tensor
from headport.session import library_version

__all__ = [
    "INLINE_BYTES",
    "add_stage",
    "graph_entry",
    "load_graphs",
    "rewrite_bundle",
    "write_graphs",
]

INLINE_BYTES = 1024  # smaller vectors and scalars stay inside the .onnx file
_PAGE_BYTES = 4096  # ONNX Runtime maps external data page-wise; large tensors start on a page
_CACHE_LINE_BYTES = 64


def load_graphs(bundle: Bundle) -> dict[str, ir.Model]:
    """All graphs of a bundle by name; tensors stay on disk until they are read."""
    return {
        name: ir.load(bundle.file(graph.file)) for name, graph in bundle.manifest.graphs.items()
    }


def write_graphs(
    models: Mapping[str, ir.Model], files: Mapping[str, str], folder: Path
) -> tuple[Tensor, ...]:
    """Write graphs and their tensors into an empty bundle folder.

    Matrices, and whatever else is at least `INLINE_BYTES` long, go to `data/`: tensors that more
    than one graph reads to `data/shared.bin`, the others to `data/<graph>.bin`. Equal tensors
    (same bytes, dtype and shape) are stored once, also across graphs. Tensors are written one at
    a time. The models' initialisers point to the written files afterwards, until those move.

    Args:
        models: Graph name → model.
        files: Graph name → file name, such as `backbone.onnx`.
        folder: The bundle's folder.

    Returns:
        The tensor ledger.

    Raises:
        BundleError: If an initialiser has no value.
    """
    uses: dict[_Key, list[tuple[str, ir.Value]]] = {}
    for graph_name, model in models.items():
        for value in _initializers(model):
            tensor = value.const_value
            if tensor is None:
                raise BundleError(f"{graph_name}: initialiser {value.name} has no value")
            if _lies_outside(tensor):
                uses.setdefault(_key(tensor), []).append((graph_name, value))
            elif isinstance(tensor, ir.ExternalTensor):  # its file stays behind
                value.const_value = ir.Tensor(tensor.numpy().copy(), tensor.dtype, name=tensor.name)
    (folder / "data").mkdir()
    ledger = tuple(_store(key, readers, folder) for key, readers in uses.items())
    for name, model in models.items():
        ir.save(model, folder / files[name])
    return ledger


def _initializers(model: ir.Model) -> Iterator[ir.Value]:
    for graph in model.graphs():
        yield from graph.initializers.values()


def _lies_outside(tensor: ir.TensorProtocol) -> bool:
    return tensor.nbytes >= INLINE_BYTES or (tensor.nbytes > 0 and len(tensor.shape) >= 2)


_Key = tuple[str, str, tuple[int, ...]]  # sha256, dtype, shape


def _key(tensor: ir.TensorProtocol) -> _Key:
    digest = hashlib.sha256(tensor.tobytes()).hexdigest()
    return digest, tensor.dtype.name, tuple(tensor.shape.numpy())


def _store(key: _Key, readers: list[tuple[str, ir.Value]], folder: Path) -> Tensor:
    sha256, dtype, shape = key
    graph_names = {graph for graph, _ in readers}
    location = f"data/{'shared' if len(graph_names) > 1 else graph_names.pop()}.bin"
    tensor = readers[0][1].const_value
    assert tensor is not None
    align = _PAGE_BYTES if tensor.nbytes >= _PAGE_BYTES else _CACHE_LINE_BYTES
    with (folder / location).open("ab") as stream:
        stream.write(b"\0" * (-stream.tell() % align))
        offset = stream.tell()
        length = stream.write(tensor.tobytes())
    for _, value in readers:
        value.const_value = ir.ExternalTensor(
            location,
            offset,
            length,
            tensor.dtype,
            shape=ir.Shape(shape),
            name=value.name or "",
            base_dir=folder,
        )
    return Tensor(
        name=readers[0][1].name or "",
        sha256=sha256,
        dtype=dtype.lower(),
        shape=shape,
        file=location,
        offset=offset,
        length=length,
        consumers=tuple(f"{graph}:{value.name}" for graph, value in readers),
    )


def rewrite_bundle(
    bundle: Bundle,
    models: Mapping[str, ir.Model],
    folder: Path,
    new_heads: Mapping[str, str] | None = None,
) -> Manifest:
    """Write a bundle's changed graphs, and all it carries beside them, into a draft's folder.

    Args:
        bundle: Where the graphs came from.
        models: Every graph of the bundle, by name, and those of `new_heads`.
        folder: The draft's empty folder.
        new_heads: Graph name → file name of head graphs that the bundle does not have yet.

    Returns:
        The bundle's manifest with the new graphs and ledger, and without self-test and files.
    """
    old = bundle.manifest
    ports = {name: (g.file, g.role) for name, g in old.graphs.items()}
    ports |= {name: (file, "head") for name, file in (new_heads or {}).items()}
    assert models.keys() == ports.keys()
    ledger = write_graphs(models, {name: file for name, (file, _) in ports.items()}, folder)
    copy_files(bundle.path, carried_files(old), folder)
    graphs = {name: graph_entry(models[name], *port) for name, port in ports.items()}
    return msgspec.structs.replace(old, graphs=graphs, tensors=ledger, selftest=None, files={})


def add_stage(
    manifest: Manifest, name: str, options: dict[str, Any], report: dict[str, Any]
) -> Manifest:
    """The manifest with one more stage in its provenance: what was asked for and measured."""
    versions = {
        "headport": __version__,
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "onnx-ir": version("onnx-ir"),
        "onnxruntime": library_version(),
    }
    stage = Stage(stage=name, options=options, versions=versions, report=report)
    stages = (*manifest.provenance.stages, stage)
    provenance = msgspec.structs.replace(manifest.provenance, stages=stages)
    return msgspec.structs.replace(manifest, provenance=provenance)


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
