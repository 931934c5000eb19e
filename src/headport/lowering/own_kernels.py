"""Products by headport's own kernel in place of ONNX Runtime's.

    MatMulNBits(x, W, S)                                →  BlockMatMul(x, W, S)
    MatMulNBits([x₁; x − x₁], W, S) split in two, added  →  BlockMatMul(x, W, S)

Weights stay as they are stored. Activations are kept to 16 bits in each block, which loses less
than the two rows of 8 bits lose (max|x| / 65,534 against / 64,516), and takes the time of one. So
after this an INT8 product that was `rounded` is `residual`, and is held to the bounds of that. An
INT4 one stays `rounded`: there 8 bits take half of the time of 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from headport.certificate import rounds_in_graph
from headport.errors import LoweringError
from headport.head_parts import all_parts, with_heads
from headport.kernels import ACTIVATION_BITS, COARSE, DOMAIN, FINE, OPTION, PRODUCT, VERSION
from headport.lowering.emit import CONTRIB, Emitter, attribute, replace
from headport.lowering.match import Match
from headport.lowering.own_guards import drop_guards
from headport.lowering.product_kernels import ACTIVATIONS
from headport.manifest import BackboneQuantization, Head, Manifest

__all__ = ["adopt_in_head", "adopt_kernels", "with_kernels"]

_WAS = "MatMulNBits"
_INT8_ACTIVATIONS = 4
_BLOCKS = (32, 64, 128, 256)
_KEPT = ("N", "K", "bits", "block_size")


def adopt_kernels(model: ir.Model) -> list[Match]:
    """Give every product of a backbone the own kernel.

    Raises:
        LoweringError: If one has a form that the kernel does not know.
    """
    matches = []
    for node in [n for n in model.graph if _rounds(n)]:
        fault = _fault(node)
        if fault:
            raise LoweringError(
                f"--kernels: {_name(node)} has {fault}; lower without --kernels, or quantise it "
                "otherwise"
            )
        matches.append(Match(f"product {_name(node)}", _WAS, _adopt(model, node)))
    common_passes.RemoveUnusedNodesPass()(model)  # what made two rows of one
    return matches


def adopt_in_head(model: ir.Model, head: Head, name: str) -> list[Match]:
    """The same for a head, which may keep ONNX Runtime's kernel.

    So does one whose proof takes rows that its graph has rounded as they are: this kernel rounds
    them once more.
    """
    matches = []
    for node in [n for n in model.graph if _rounds(n)]:
        fault = _fault(node)
        if rounds_in_graph(head):
            fault = "rows that its graph rounds"
        elif _is_doubled(node) and _sum(node) is None:
            fault = "rows of its own"
        became = None if fault else _adopt(model, node)
        matches.append(Match(f"head {name}", _WAS, became, f"it has {fault}" if fault else ""))
    drop_guards(model.graph)
    common_passes.RemoveUnusedNodesPass()(model)
    return matches


def with_kernels(manifest: Manifest, models: Mapping[str, ir.Model]) -> Manifest:
    """A lowered manifest that says which graphs need the library and what it does."""
    own = [node for model in models.values() for node in model.graph if node.domain == DOMAIN]
    if not own:
        return manifest
    multiplies = {
        name
        for name, model in models.items()
        if any((n.domain, n.op_type) == (DOMAIN, PRODUCT) for n in model.graph)
    }
    heads = {
        name: _head_kept(head) if head.graph in multiplies else head
        for name, head in all_parts(manifest).items()
    }
    record = manifest.backbone_quantization
    if record is not None and manifest.backbone_name in multiplies:
        record = _products_kept(record)
    return msgspec.structs.replace(
        with_heads(manifest, heads),
        backbone_quantization=record,
        session_options={**manifest.session_options, OPTION: str(VERSION)},
    )


def _products_kept(record: BackboneQuantization) -> BackboneQuantization:
    """What products do now; said once, where all do the same."""
    products = {name: how for name, how in record.matrices.items() if how.block is not None}
    kept = {name: _kept(how.format, record.activations_of(how)) for name, how in products.items()}
    common = record.activations
    if len(set(kept.values())) == 1:
        (common,) = set(kept.values())
    changed = {
        name: msgspec.structs.replace(how, activations=None if kept[name] == common else kept[name])
        for name, how in products.items()
    }
    return msgspec.structs.replace(
        record, activations=common, matrices={**record.matrices, **changed}
    )


def _head_kept(head: Head) -> Head:
    how = head.quantization
    if how is None:
        return head
    kept = _kept(how.format, how.activations)
    return msgspec.structs.replace(
        head, quantization=msgspec.structs.replace(how, activations=kept)
    )


def _kept(form: str, asked: str) -> Any:
    """What the kernel does to activations: for INT8 weights it keeps more than was asked for."""
    return "residual" if asked == "rounded" and form.startswith("int8") else asked


def _rounds(node: ir.Node) -> bool:
    level = attribute(node, "accuracy_level", 0)
    return bool((node.domain, node.op_type, level) == (CONTRIB, _WAS, _INT8_ACTIVATIONS))


def _fault(node: ir.Node) -> str:
    x, scale = node.inputs[0], node.inputs[2]
    assert x is not None and scale is not None
    block = attribute(node, "block_size", 0)
    if block not in _BLOCKS:
        return f"blocks of {block}, the kernel knows {', '.join(map(str, _BLOCKS))}"
    if any(value is not None for value in node.inputs[3:]):
        return "zero points of its own, which the kernel does not read"
    if scale.dtype != ir.DataType.FLOAT or x.dtype not in (None, ir.DataType.FLOAT):
        return f"activations of type {x.dtype or scale.dtype}, the kernel takes float32"
    return ""


def _adopt(model: ir.Model, node: ir.Node) -> str:
    x, total = node.inputs[0], _sum(node)
    if total is not None:
        x = _whole(node)
    # Several products may share a weight, so its name would not do.
    emit = Emitter(model.graph, node, node.outputs[0].name or _name(node))
    kept = {name: attribute(node, name, 0) for name in _KEPT}
    product = emit.op(
        PRODUCT,
        [x, *node.inputs[1:3]],
        "own",
        domain=DOMAIN,
        activation="none",
        epsilon=0.0,
        **kept | {ACTIVATION_BITS: _activation_bits(node)},
    )
    product.type = ir.TensorType(ir.DataType.FLOAT)
    model.opset_imports[DOMAIN] = VERSION
    if total is None:
        replace(model.graph, node, [product])
        return PRODUCT
    parts = {id(value) for value in _split(node).outputs}  # type: ignore[union-attr]
    others = [value for value in total.inputs if id(value) not in parts]
    emit = Emitter(model.graph, total, total.outputs[0].name or _name(node))
    replace(model.graph, total, [emit.op("Sum", [product, *others], "own_sum")])
    return PRODUCT


def _activation_bits(node: ir.Node) -> int:
    asked = node.metadata_props.get(ACTIVATIONS)
    rounded = not _is_doubled(node) and asked in (None, "rounded")
    return COARSE if rounded and attribute(node, "bits", 0) == 4 else FINE


def _is_doubled(node: ir.Node) -> bool:
    rows = node.inputs[0].producer() if node.inputs[0] else None
    return rows is not None and rows.op_type == "Concat" and attribute(rows, "axis", None) == 0


def _whole(node: ir.Node) -> ir.Value:
    """The x of a product with [x₁; x − x₁]."""
    rows = node.inputs[0].producer()  # type: ignore[union-attr]
    rest = rows.inputs[1].producer()  # type: ignore[union-attr]
    if rest is None or rest.op_type != "Sub" or rest.inputs[1] is not rows.inputs[0]:  # type: ignore[union-attr]
        raise LoweringError(f"{_name(node)} multiplies two rows that are not x₁ and x − x₁")
    x = rest.inputs[0]
    assert x is not None
    return x


def _split(node: ir.Node) -> ir.Node | None:
    """What parts the two rows' products."""
    users = [use.node for use in node.outputs[0].uses()]
    if not _is_doubled(node) or len(users) != 1 or users[0].op_type != "Split":
        return None
    return users[0]


def _sum(node: ir.Node) -> ir.Node | None:
    """The one node that adds the two rows' products; None where there is no such node."""
    split = _split(node)
    if split is None:
        return None
    users = {id(use.node): use.node for value in split.outputs for use in value.uses()}
    if len(users) != 1:
        return None
    (found,) = users.values()
    return found if found.op_type in ("Add", "Sum") else None


def _name(node: ir.Node) -> str:
    weight = node.inputs[1]
    return (weight.name if weight is not None else None) or node.outputs[0].name or _WAS
