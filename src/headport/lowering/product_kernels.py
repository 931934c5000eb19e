"""What each target multiplies with the backbone's stored matrices with: a row for each.

    Reshape → Gemm(x, DequantizeLinear(Q, S), transB=1) → Reshape  →  MatMulNBits(x, Q + Z, S)

With `accuracy_level` 4 the operator rounds each block of x to INT8, with 1 it computes with x as it
is. It takes x of any number of dimensions. Residual: it is handed two rows for one, x rounded as it
would round it and what that lost, and the two results are added; weights are read once for both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import onnx_ir as ir

from headport.errors import LoweringError
from headport.lowering.emit import CONTRIB, Emitter, attribute, replace
from headport.lowering.match import Match
from headport.lowering.matrices import Product, find_products
from headport.lowering.packed import pack_weight
from headport.lowering.rounding import round_activations
from headport.lowering.siblings import INPUT, SUMS
from headport.manifest import BackboneQuantization, StoredMatrix

__all__ = ["ACTIVATIONS", "ProductKernel", "check_matrices", "kernel_of", "lower_products"]

ACTIVATIONS = "headport.activations"  # metadata of a product: what its record asks for

_OPERATOR = "MatMulNBits"
_FLOAT_ACTIVATIONS, _INT8_ACTIVATIONS = 1, 4
# Each was run against the float64 product, with rows that do and do not fill their last block.
_BLOCKS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class ProductKernel:
    """How a target multiplies with a matrix."""

    accuracy_level: int | None  # of MatMulNBits; None: the product stays portable
    blocks: tuple[int, ...]
    reason: str = ""  # why it stays
    residual: bool = False  # two rows for one


_WIDENED = ProductKernel(None, (), "ONNX Runtime widens it to float32 when it loads it")
_SLOW = "its 8-bit kernel takes some hundred times as long with float activations"
# (target, format, activations) → kernel. What has no row is refused.
_EMBEDDING_TARGETS = ("ort-cpu",)
_KERNELS = {
    ("ort-cpu", "int8", "rounded"): ProductKernel(_INT8_ACTIVATIONS, _BLOCKS),
    ("ort-cpu", "int8", "residual"): ProductKernel(_INT8_ACTIVATIONS, _BLOCKS, residual=True),
    ("ort-cpu", "int8", "exact"): ProductKernel(None, _BLOCKS, _SLOW),
    ("ort-cpu", "int4", "rounded"): ProductKernel(_INT8_ACTIVATIONS, _BLOCKS),
    ("ort-cpu", "int4", "residual"): ProductKernel(_INT8_ACTIVATIONS, _BLOCKS, residual=True),
    ("ort-cpu", "int4", "exact"): ProductKernel(_FLOAT_ACTIVATIONS, _BLOCKS),
    ("ort-cpu", "fp16", "rounded"): _WIDENED,
    ("ort-cpu", "fp16", "residual"): _WIDENED,
    ("ort-cpu", "fp16", "exact"): _WIDENED,
}


def kernel_of(target: str, how: StoredMatrix, activations: str) -> ProductKernel | None:
    """The row of a target and a way to store a matrix; None where it cannot be run."""
    kernel = _KERNELS.get((target, how.format, activations))
    if kernel is None or (how.block is not None and how.block not in kernel.blocks):
        return None
    return kernel


def check_matrices(record: BackboneQuantization | None, target: str) -> None:
    """Refuse what a target cannot run.

    Raises:
        LoweringError: If it has no kernel for a matrix's format, block or activations.
    """
    if record is None:
        return
    if record.embedding and target not in _EMBEDDING_TARGETS:
        raise LoweringError(
            f"target {target} has no proved kernel for an embedding stored in fewer bits; "
            "quantise the head alone for it"
        )
    faults: dict[str, int] = {}
    for how in record.matrices.values():
        if kernel_of(target, how, record.activations_of(how)) is None:
            shown = how.format if how.block is None else f"{how.format} block {how.block}"
            shown += f" with {record.activations_of(how)} activations"
            faults[shown] = faults.get(shown, 0) + 1
    if faults:
        listed = ", ".join(f"{count} × {what}" for what, count in faults.items())
        raise LoweringError(
            f"target {target} has no proved kernel for matrices of the backbone stored as "
            f"{listed}; quantise the head alone for it"
        )


def lower_products(
    model: ir.Model, record: BackboneQuantization, target: str, *, one_row: bool = False
) -> list[Match]:
    """Give every product with a stored matrix its kernel.

    Args:
        model: The backbone; changed in place.
        record: How its matrices are stored, and what may be done to activations.
        target: Row of `headport.lowering.targets`.
        one_row: Residual products get one row too, for a kernel that takes their place and needs
            no second; the node's metadata tells it what was asked for.
    """
    matches: dict[Match, None] = {}  # a set that keeps its order
    packed: dict[str, ir.Value] = {}
    doubled: dict[tuple[ir.Value, int], ir.Value] = {}  # (x, block) → its two rows
    restores: dict[int, ir.Node] = {}
    for product in find_products(model):
        how = record.matrices[product.name]
        activations = record.activations_of(how)
        kernel = kernel_of(target, how, activations)
        assert kernel is not None, "check_matrices comes first"
        was = f"{product.restore.op_type} + Gemm"
        if kernel.accuracy_level is None:
            matches[Match(f"{how.format} matrices", was, None, kernel.reason)] = None
            continue
        if product.name not in packed:
            packed[product.name] = _packed(product)
            model.graph.register_initializer(packed[product.name])
        kernel = dataclasses.replace(kernel, residual=kernel.residual and not one_row)
        made = _lower(model, product, packed[product.name], kernel, doubled)
        if one_row:
            made.metadata_props[ACTIVATIONS] = activations
        restores[id(product.restore)] = product.restore
        became = f"{_OPERATOR} ({how.format}), {activations} activations"
        matches[Match(f"matrix {product.name}", was, became)] = None
    for restore in restores.values():
        assert restore.inputs[0] is not None
        name = restore.inputs[0].name or ""
        model.graph.remove(restore, safe=True)
        del model.graph.initializers[name]
    for how in record.embedding.values():
        restored = "Cast" if how.block is None else "DequantizeLinear"
        reason = "it reads and restores only the rows at hand"
        matches[Match(f"{how.format} embedding", f"Gather + {restored}", None, reason)] = None
    if packed:
        model.opset_imports[CONTRIB] = 1
    return list(matches)


def _packed(product: Product) -> ir.Value:
    """The stored integers as the operator reads them, packed when they are written."""
    stored = product.restore.inputs[0]
    assert stored is not None and stored.const_value is not None and stored.dtype is not None
    # Holds the constants when the node in the graph is gone.
    kept = ir.node(
        product.restore.op_type,
        [ir.val(v.name, const_value=v.const_value) for v in product.restore.inputs if v],
        {name: a.value for name, a in product.restore.attributes.items()},
    )
    kept.inputs[0].dtype = stored.dtype  # type: ignore[union-attr]
    N, K = (int(d) for d in stored.const_value.shape.numpy())
    bits, block = stored.dtype.itemsize * 8, int(attribute(kept, "block_size", 0))
    shape = ir.Shape((N, -(-K // block), int(block * bits) // 8))
    name = f"{stored.name}.nbits"

    def evaluate() -> ir.TensorProtocol:
        return ir.Tensor(pack_weight(kept).values, name=name)

    lazy = ir.LazyTensor(evaluate, ir.DataType.UINT8, shape, name=name, cache=False)
    kind = ir.TensorType(ir.DataType.UINT8)
    return ir.Value(name=name, type=kind, shape=shape, const_value=lazy)


def _lower(
    model: ir.Model,
    product: Product,
    packed: ir.Value,
    kernel: ProductKernel,
    doubled: dict[tuple[ir.Value, int], ir.Value],
) -> ir.Node:
    stored, scale = product.restore.inputs[:2]
    assert stored is not None and stored.const_value is not None and stored.dtype is not None
    N, K = (int(d) for d in stored.const_value.shape.numpy())
    # The two rows of a residual product need the form with two dimensions that Gemm has.
    last = product.product if kernel.residual else product.y.producer()
    x = product.product.inputs[0] if kernel.residual else product.x
    assert last is not None and x is not None
    emit = Emitter(model.graph, last, product.product.outputs[0].name or product.name)
    block = int(attribute(product.restore, "block_size", 0))
    rows = x
    if kernel.residual:
        key = (product.x, block)  # each product has a Reshape of its own behind it
        if key not in doubled:
            first = round_activations(emit, x, K, block).first
            rest = emit.op("Sub", [x, first], "rest")
            doubled[key] = emit.op("Concat", [first, rest], "first_and_rest", axis=0)
        rows = doubled[key]
    made = emit.op(
        _OPERATOR,
        [rows, packed, scale],
        "nbits",
        domain=CONTRIB,
        K=K,
        N=N,
        bits=int(stored.dtype.itemsize * 8),
        block_size=block,
        accuracy_level=kernel.accuracy_level,
    )
    node = made.producer()
    assert node is not None
    if kernel.residual:
        parts = emit.ops("Split", [made], ("of_first", "of_rest"), axis=0, num_outputs=2)
        made = emit.op("Add", parts, "of_both")
        node.metadata_props[INPUT] = x.name or ""
        node.metadata_props[SUMS] = product.product.outputs[0].name or ""
        made.name = product.product.outputs[0].name
    replace(model.graph, last, [made])
    if product.product is not last:
        model.graph.remove(product.product, safe=True)
    return node
