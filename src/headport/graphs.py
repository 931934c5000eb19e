"""Reading and writing a bundle's graphs: `.onnx` files beside `data/*.bin`, each tensor once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.bundle import Bundle, carried_files, copy_files
from headport.errors import BundleError
from headport.kernels import CANDIDATES
from headport.manifest import Graph, Manifest, Port, Tensor
from headport.stages import with_stage

__all__ = [
    "INLINE_BYTES",
    "BlockTensor",
    "add_stage",
    "graph_entry",
    "load_graphs",
    "rewrite_bundle",
    "write_graphs",
]

INLINE_BYTES = 1024  # smaller vectors and scalars stay inside the .onnx file
_PAGE_BYTES = 4096  # ONNX Runtime maps external data page-wise; large tensors start on a page
_CACHE_LINE_BYTES = 64


class BlockTensor(ir.LazyTensor):
    """A tensor that is computed when it is needed, and written without ever being whole.

    Args:
        blocks: Gives consecutive pieces of the value along its first axis, in bytes as ONNX stores
            them or as arrays of the element type.
        dtype: Element type.
        shape: Dimensions.
        name: Name.
    """

    def __init__(
        self,
        blocks: Callable[[], Iterable[npt.NDArray[Any]]],
        dtype: ir.DataType,
        shape: tuple[int, ...],
        name: str,
    ) -> None:
        super().__init__(self._whole, dtype, ir.Shape(shape), name=name)
        self.blocks = blocks

    def _whole(self) -> ir.TensorProtocol:
        value = np.empty(self.shape.numpy(), self.dtype.numpy())
        rows = value.reshape(-1)
        done = 0
        for block in self.blocks():
            rows[done : done + block.size] = block.reshape(-1)
            done += block.size
        return ir.Tensor(value, self.dtype, name=self.name)


def load_graphs(bundle: Bundle) -> dict[str, ir.Model]:
    """All graphs of a bundle by name; tensors stay on disk until they are read.

    Raises:
        BundleError: If a file of tensors has another name besides: what is written through that one
            would change the bundle, and onnx_ir reads no such file.
    """
    for name in sorted({tensor.file for tensor in bundle.manifest.tensors}):
        if (names := bundle.file(name).stat().st_nlink) > 1:
            raise BundleError(
                f"{bundle.path / name}: a file of its own was expected, this one has {names} names "
                "(hard links); copy the bundle and work on the copy"
            )
    return {
        name: ir.load(bundle.file(graph.file)) for name, graph in bundle.manifest.graphs.items()
    }


def write_graphs(
    models: Mapping[str, ir.Model], files: Mapping[str, str], folder: Path
) -> tuple[Tensor, ...]:
    """Write graphs and their tensors into an empty bundle folder.

    Matrices, scales, tables, and whatever else is at least `INLINE_BYTES` long, go to `data/`:
    tensors that more than one graph reads to `data/shared.bin`, the others to `data/<graph>.bin`.
    Equal tensors (same bytes, dtype and shape) are stored once, also across graphs. Tensors are
    written one at a time. The models' initialisers point to the written files afterwards, until
    those move.

    Args:
        models: Graph name → model.
        files: Graph name → file name, such as `backbone.onnx`.
        folder: The bundle's folder.

    Returns:
        The tensor ledger.

    Raises:
        BundleError: If an initialiser has no value.
    """
    store = _Store(folder / "data")
    waiting: list[tuple[str, ir.Value, ir.TensorProtocol]] = []
    for graph_name, model in models.items():
        for value in _initializers(model):
            tensor = value.const_value
            if tensor is None:
                raise BundleError(f"{graph_name}: initialiser {value.name} has no value")
            if _lies_outside(tensor) or _is_checked(value):
                waiting.append((graph_name, value, tensor))
            elif isinstance(tensor, ir.ExternalTensor):  # its file stays behind
                value.const_value = ir.Tensor(tensor.numpy().copy(), tensor.dtype, name=tensor.name)
    # Only a tensor whose like another graph has as well can be shared, so only those are looked at
    # before they are written.
    kinds: dict[tuple[Any, ...], set[str]] = {}
    for graph_name, _, tensor in waiting:
        kinds.setdefault(_kind(tensor), set()).add(graph_name)
    keys = {
        id(value): (_digest(tensor), *_kind(tensor))
        for _, value, tensor in waiting
        if len(kinds[_kind(tensor)]) > 1
    }
    graphs_of: dict[tuple[Any, ...], set[str]] = {}
    for graph_name, value, _ in waiting:
        if id(value) in keys:
            graphs_of.setdefault(keys[id(value)], set()).add(graph_name)
    for graph_name, value, tensor in waiting:
        shared = len(graphs_of.get(keys.get(id(value), ()), ())) > 1
        store.put(tensor, value, graph_name, "shared" if shared else graph_name)
    for name, model in models.items():
        ir.save(model, folder / files[name])
    return store.ledger()


def _initializers(model: ir.Model) -> Iterator[ir.Value]:
    for graph in model.graphs():
        yield from graph.initializers.values()


def _lies_outside(tensor: ir.TensorProtocol) -> bool:
    return tensor.nbytes >= INLINE_BYTES or (tensor.nbytes > 0 and len(tensor.shape) >= 2)


def _is_checked(value: ir.Value) -> bool:
    # Scales, zero points, and what is looked up by token, such as the bias of candidates: checks
    # read them from the ledger, however few they are.
    return any(
        use.node.op_type in ("DequantizeLinear", CANDIDATES)
        or (use.node.op_type == "Gather" and use.idx == 0)
        for use in value.uses()
    )


def _kind(tensor: ir.TensorProtocol) -> tuple[Any, ...]:
    return tensor.dtype.name, tuple(tensor.shape.numpy())


def _pieces(tensor: ir.TensorProtocol) -> Iterator[Any]:
    # Bytes, or arrays of bytes.
    if not isinstance(tensor, BlockTensor):
        yield tensor.tobytes()
        return
    for block in tensor.blocks():
        yield np.ascontiguousarray(block).reshape(-1).view(np.uint8)


def _digest(tensor: ir.TensorProtocol) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(tensor):
        digest.update(piece)
    return digest.hexdigest()


class _Store:
    """Files of tensors; equal ones are written once per file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._entries: dict[tuple[Any, ...], Tensor] = {}

    def put(
        self, tensor: ir.TensorProtocol, value: ir.Value, graph_name: str, file_name: str
    ) -> None:
        location = f"data/{file_name}.bin"
        consumer = f"{graph_name}:{value.name}"
        align = _PAGE_BYTES if tensor.nbytes >= _PAGE_BYTES else _CACHE_LINE_BYTES
        with (self._folder / f"{file_name}.bin").open("ab") as stream:
            end = stream.tell()
            sha256, offset, length = _append(stream, tensor, align)
            key = (location, sha256, *_kind(tensor))
            if key in self._entries:  # it is there already
                stream.truncate(end)
                entry = self._entries[key]
                consumers = (*entry.consumers, consumer)
                self._entries[key] = msgspec.structs.replace(entry, consumers=consumers)
            else:
                self._entries[key] = Tensor(
                    name=value.name or "",
                    sha256=sha256,
                    dtype=tensor.dtype.name.lower(),
                    shape=tuple(tensor.shape.numpy()),
                    file=location,
                    offset=offset,
                    length=length,
                    consumers=(consumer,),
                )
        entry = self._entries[key]
        value.const_value = ir.ExternalTensor(
            location,
            entry.offset,
            entry.length,
            tensor.dtype,
            shape=ir.Shape(entry.shape),
            name=value.name or "",
            base_dir=self._folder.parent,
        )

    def ledger(self) -> tuple[Tensor, ...]:
        return tuple(self._entries.values())


def _append(stream: IO[bytes], tensor: ir.TensorProtocol, align: int) -> tuple[str, int, int]:
    # Gives sha256, offset and length of what was written.
    stream.write(b"\0" * (-stream.tell() % align))
    offset, digest = stream.tell(), hashlib.sha256()
    for piece in _pieces(tensor):
        digest.update(piece)
        stream.write(piece)
    return digest.hexdigest(), offset, stream.tell() - offset


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
    return with_stage(manifest, name, options, report, packages=("onnx-ir",))


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
