"""Faults planted in a copy of a bundle, which is then sealed again: only its answers are wrong.

Checksums, tensor ledger, manifest and self-test all fit the damaged files afterwards.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir

from headport.bundle import MANIFEST, Bundle, file_entry
from headport.ledger import head_weight
from headport.manifest import Head, Manifest, Tensor, decode_manifest, encode_manifest
from headport.selftest import write_selftest

Fault = Callable[[Path], None]


def sabotage(source: Path, target: Path, fault: Fault) -> Path:
    """Copy a bundle, plant a fault in the copy, seal it again."""
    shutil.copytree(source, target)
    fault(target)
    reseal(target)
    return target


def reseal(folder: Path) -> None:
    """Make ledger, self-test and checksums fit whatever the files now hold."""
    manifest = read_manifest(folder)
    names = {
        f"{name}:{initializer}"
        for name, graph in manifest.graphs.items()
        for initializer in ir.load(folder / graph.file).graph.initializers
    }
    tensors = tuple(
        msgspec.structs.replace(
            tensor,
            sha256=hashlib.sha256(read_bytes(folder, tensor)).hexdigest(),
            consumers=tuple(name for name in tensor.consumers if name in names),
        )
        for tensor in manifest.tensors
        if names & set(tensor.consumers)
    )
    manifest = msgspec.structs.replace(manifest, tensors=tensors)
    manifest = write_selftest(Bundle(folder, manifest))
    files = {name: file_entry(folder / name) for name in manifest.files}
    write_manifest(folder, msgspec.structs.replace(manifest, files=files))


def read_manifest(folder: Path) -> Manifest:
    return decode_manifest((folder / MANIFEST).read_bytes(), str(folder))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_bytes(encode_manifest(manifest))


def read_bytes(folder: Path, tensor: Tensor) -> bytes:
    with (folder / tensor.file).open("rb") as stream:
        stream.seek(tensor.offset)
        return stream.read(tensor.length)


def write_bytes(folder: Path, tensor: Tensor, data: bytes) -> None:
    assert len(data) == tensor.length
    with (folder / tensor.file).open("r+b") as stream:
        stream.seek(tensor.offset)
        stream.write(data)


def _head(folder: Path, **changes: object) -> tuple[Manifest, Head, Path]:
    """The manifest and its head, with fields of the head changed to fit the fault."""
    manifest = read_manifest(folder)
    head = msgspec.structs.replace(manifest.heads["lm"], **changes)
    write_manifest(folder, msgspec.structs.replace(manifest, heads={"lm": head}))
    return manifest, head, folder / manifest.graphs[head.graph].file


def _bypass(model: ir.Model, node: ir.Node, value: ir.Value) -> None:
    """Whoever read `node`'s output, the graph's output included, reads `value` instead."""
    output = node.outputs[0]
    if output.is_graph_output():
        name, shape, kind = output.name, output.shape, output.type
        output.name = f"{name}.dropped"
        value.name, value.shape, value.type = name, shape, kind
    ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)


def _only(model: ir.Model, op_type: str) -> ir.Node:
    (node,) = (node for node in model.graph if node.op_type == op_type)
    return node


def _save(model: ir.Model, file: Path) -> None:
    used = {value.name for node in model.graph for value in node.inputs if value is not None}
    for name in [name for name in model.graph.initializers if name not in used]:
        del model.graph.initializers[name]
    ir.save(model, file)


def drop_bias(folder: Path) -> None:
    """The head adds no bias any more."""
    _, _, file = _head(folder, bias=False)
    model = ir.load(file)
    gemm = _only(model, "Gemm")
    assert len(gemm.inputs) == 3, "the head has no bias to drop"
    gemm.resize_inputs(2)
    _save(model, file)


def drop_scale(folder: Path) -> None:
    """The head's product is not scaled any more."""
    _, _, file = _head(folder, scale=1.0)
    model = ir.load(file)
    product = _only(model, "Gemm").outputs[0]
    (mul,) = (use.node for use in product.uses())
    assert mul.op_type == "Mul", "the head has no scale to drop"
    _bypass(model, mul, product)
    _save(model, file)


def drop_softcap(folder: Path) -> None:
    """The head's logits are not squashed any more: the order stays, the values do not."""
    _, _, file = _head(folder, softcap=None)
    model = ir.load(file)
    tanh = _only(model, "Tanh")
    (mul,) = (use.node for use in tanh.outputs[0].uses())
    ratio = tanh.inputs[0]
    assert ratio is not None
    divide = ratio.producer()
    assert divide is not None
    product = divide.inputs[0]
    assert product is not None
    _bypass(model, mul, product)
    for node in (tanh, divide):
        model.graph.remove(node, safe=True)
    _save(model, file)


def swap_rows(folder: Path, first: int = 3, second: int = 7) -> None:
    """Two rows of the head's weight change places."""
    manifest, head, _ = _head(folder)
    tensor, _ = head_weight(manifest, head)
    rows = np.frombuffer(read_bytes(folder, tensor), np.uint8).reshape(tensor.shape[0], -1).copy()
    rows[[first, second]] = rows[[second, first]]
    write_bytes(folder, tensor, rows.tobytes())


def flip_bit(folder: Path) -> None:
    """One weight of the backbone, the largest of its matrix, changes its sign."""
    manifest = read_manifest(folder)
    tensor = next(
        tensor
        for tensor in manifest.tensors
        if len(tensor.shape) == 2
        and "embed" not in tensor.name
        and tensor.consumers[0].startswith("backbone:")
    )
    values = np.frombuffer(read_bytes(folder, tensor), np.float32).copy()
    values.view(np.uint32)[np.abs(values).argmax()] ^= 1 << 31
    write_bytes(folder, tensor, values.tobytes())


def foreign_data(other: Path) -> Fault:
    """The head's data comes from another bundle of the same shape."""

    def plant(folder: Path) -> None:
        shutil.copyfile(other / "data/head.lm.bin", folder / "data/head.lm.bin")

    return plant


def other_head(folder: Path) -> None:
    """The head's weight is another random one: a bundle like this one, of other weights."""
    manifest, head, _ = _head(folder)
    tensor, _ = head_weight(manifest, head)
    rng = np.random.default_rng(99)
    write_bytes(folder, tensor, rng.normal(0, 0.2, tensor.shape).astype(np.float32).tobytes())


def set_session_option(key: str, value: str) -> Fault:
    """The bundle asks for another session option."""

    def plant(folder: Path) -> None:
        manifest = read_manifest(folder)
        options = manifest.session_options | {key: value}
        write_manifest(folder, msgspec.structs.replace(manifest, session_options=options))

    return plant


def flip_byte(folder: Path) -> None:
    """Damage without sealing: the checksums must notice; not to be used with `sabotage`."""
    file = folder / "data/head.lm.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
