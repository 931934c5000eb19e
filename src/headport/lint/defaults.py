"""What targets take without a word although it is rarely meant: defaults, copies, leftovers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.bundle import Bundle
from headport.errors import BundleError
from headport.ledger import find_tensor, head_weight, read_tensor
from headport.lint.findings import BundleRule, Place, Subject, nodes_of, place_of
from headport.lowering.emit import CONTRIB, attribute
from headport.lowering.matrices import find_tables
from headport.manifest import Head

__all__ = ["RULES"]

Found = Iterator[tuple[str, Place]]

_ALL = ("ort-cpu", "ort-cuda", "tensorrt")
_ACCURACY, _INT8_ACTIVATIONS = "session.qdq_matmulnbits_accuracy_level", 4
_PAGE_BYTES = 4096
# Operators that ONNX Runtime 1.32 computes in float16 on a CPU; around others it casts.
_HALF_ON_CPU = ("MatMul", "Gemm", "Cast", "CastLike", "GroupQueryAttention", "MatMulNBits")
_SCALED = ("int8", "int4", "float8e4m3fn")  # symmetric; others are not compared
_ROWS = 64  # of two matrices that are compared
_LARGEST_LOSS = 0.25  # relative; 4-bit rounding stays below it, other matrices are beyond 1


def _silent_rounding(subject: Subject) -> Found:
    if subject.manifest.session_options.get(_ACCURACY) == "0":
        return
    for name, model in subject.models.items():
        for node in nodes_of(model, "MatMul"):
            given = node.inputs[1]
            restore = given.producer() if given is not None else None
            if restore is not None and restore.op_type == "DequantizeLinear":
                yield name, place_of(node, f"DequantizeLinear before MatMul, {_ACCURACY} not set")


def _unasked_rounding(subject: Subject) -> Found:
    for head_name, head in subject.manifest.heads.items():
        if head.quantization is None or head.quantization.activations != "exact":
            continue
        for node in nodes_of(subject.models[head.graph], "MatMulNBits", domain=CONTRIB):
            if attribute(node, "accuracy_level", 0) == _INT8_ACTIVATIONS:
                yield head.graph, place_of(node, f"head {head_name}: accuracy_level 4")


def _two_copies(subject: Subject) -> Found:
    bundle, manifest = subject.bundle, subject.bundle.manifest
    for name, graph in manifest.graphs.items():
        if graph.role != "backbone":
            continue
        for table in find_tables(subject.models[name]):
            value = table.value.const_value
            for head in manifest.heads.values():
                rows = None if head.tied else _head_rows(bundle, head)
                if rows is None or value is None or rows.shape[1] != value.shape.numpy()[1]:
                    continue
                embedded = value.numpy()[:_ROWS].astype(np.float64)
                lost = np.linalg.norm(embedded[: len(rows)] - rows)
                if len(rows) and lost <= _LARGEST_LOSS * np.linalg.norm(embedded):
                    size = head_weight(manifest, head)[0].length
                    found = (
                        f"the embedding ({value.nbytes / 1e6:.1f} MB) and the head's weight "
                        f"{head.weight} ({size / 1e6:.1f} MB) are one matrix"
                    )
                    yield name, Place(table.name, found)


def _head_rows(bundle: Bundle, head: Head) -> npt.NDArray[np.float64] | None:
    """The first rows of a head's weight as numbers; None where it is packed for a kernel."""
    entry, name = head_weight(bundle.manifest, head)
    if len(entry.shape) != 2:
        return None
    try:
        rows = read_tensor(bundle, entry)[:_ROWS].astype(np.float64)
        if entry.dtype not in _SCALED:
            return rows
        stem = name.rsplit(".", 1)[0]
        scale = find_tensor(bundle.manifest, head.graph, f"{stem}.scale")
        steps = read_tensor(bundle, scale)[:_ROWS].astype(np.float64).reshape(len(rows), -1)
    except (BundleError, ValueError):  # a ledger that does not fit its file is another rule's
        return None
    block = head.quantization.block if head.quantization else None
    return rows * np.repeat(steps, block or rows.shape[1], axis=1)[:, : rows.shape[1]]


def _head_left_out(subject: Subject) -> Found:
    record = subject.manifest.backbone_quantization
    if record is None or not record.matrices:
        return
    for name, head in subject.manifest.heads.items():
        if head.quantization is None:
            yield (
                head.graph,
                Place(head.weight, f"the backbone is quantised, the head {name} is not"),
            )


def _float_detours(subject: Subject) -> Found:
    for name, model in subject.models.items():
        count: dict[str, int] = {}
        for node in nodes_of(model):
            if node.op_type not in _HALF_ON_CPU and any(
                value is not None and value.dtype == ir.DataType.FLOAT16 for value in node.inputs
            ):
                count[node.op_type] = count.get(node.op_type, 0) + 1
        if count:
            listed = ", ".join(f"{number} × {kind}" for kind, number in sorted(count.items()))
            yield name, Place(model.graph.name or name, f"float16 in {listed}")


def _stale_data(subject: Subject) -> Found:
    ledger = {
        consumer: tensor for tensor in subject.manifest.tensors for consumer in tensor.consumers
    }
    for name, model in subject.models.items():
        for value in model.graph.initializers.values():
            tensor = value.const_value
            entry = ledger.get(f"{name}:{value.name}")
            if not isinstance(tensor, ir.ExternalTensor) or entry is None:
                continue
            place = (str(tensor.location), tensor.offset, tensor.length)
            if place != (entry.file, entry.offset, entry.length):
                found = f"it reads {place}, the ledger says {entry.file} at {entry.offset}"
                yield name, Place(value.name or "", found)


def _orphan_bytes(subject: Subject) -> Found:
    used: dict[str, int] = {}
    for tensor in subject.manifest.tensors:
        used[tensor.file] = used.get(tensor.file, 0) + tensor.length
    counts = {file: sum(t.file == file for t in subject.manifest.tensors) for file in used}
    for file, size in used.items():
        entry = subject.manifest.files.get(file)
        if entry is not None and entry.bytes > size + counts[file] * _PAGE_BYTES:
            yield "bundle", Place(file, f"{entry.bytes - size} bytes in it belong to no tensor")


RULES = (
    BundleRule(
        name="silent-rounding",
        check=_silent_rounding,
        why="ONNX Runtime fuses the two into MatMulNBits and then rounds activations to INT8, "
        "unless that option is 0",
        cure="write the bundle with headport, whose manifest sets it, or set it in your session",
        targets=("ort-cpu", "ort-cuda"),
        severity="error",
    ),
    BundleRule(
        name="unasked-rounding",
        check=_unasked_rounding,
        why="that kernel rounds activations to INT8; the head was quantised for exact ones",
        cure="lower the portable bundle again",
        targets=("ort-cpu", "ort-cuda"),
        severity="error",
    ),
    BundleRule(
        name="two-copies",
        check=_two_copies,
        why="one matrix is shipped, and held in memory, in two forms",
        cure="quantise with --embedding int8 as well: both then read the same integers",
        targets=_ALL,
    ),
    BundleRule(
        name="head-left-out",
        check=_head_left_out,
        why="the head is often the largest matrix",
        cure="quantise with --head int8 beside --backbone",
        targets=_ALL,
    ),
    BundleRule(
        name="float-detours",
        check=_float_detours,
        why="ONNX Runtime has no float16 kernel for them on a CPU and casts to float32 and back",
        cure="export with --dtype fp32 for CPUs",
        targets=("ort-cpu",),
    ),
    BundleRule(
        name="stale-data",
        check=_stale_data,
        why="the graph reads other bytes than those that were checked",
        cure="write the bundle again",
        targets=_ALL,
        severity="error",
    ),
    BundleRule(
        name="orphan-bytes",
        check=_orphan_bytes,
        why="they are shipped and never read",
        cure="write the bundle again",
        targets=_ALL,
    ),
)
