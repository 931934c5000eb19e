"""What TensorRT's kernels for ai.onnx.Attention do not compute."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from headport.lint.findings import GraphRule, Place, nodes_of, place_of
from headport.lowering.emit import attribute
from headport.lowering.tensorrt.attention import LARGEST_HEAD

__all__ = ["RULES"]

_OPERATOR = "Attention"
_MASK, _PAST_KEY, _PADDING = 3, 4, 6  # places of its optional inputs
_LOWER = "lower with `headport lower --target tensorrt`"


def _has(node: ir.Node, place: int) -> bool:
    return len(node.inputs) > place and node.inputs[place] is not None


def _caches(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, _OPERATOR):
        more = [value for value in node.outputs[1:] if value.name]
        if _has(node, _PAST_KEY) or more:
            yield place_of(node, f"{1 + len(more)} outputs, caches inside the operator")


def _types(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, _OPERATOR):
        q = node.inputs[0]
        if q is not None and q.dtype == ir.DataType.FLOAT:
            yield place_of(node, "it computes in float32")


def _softcap(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, _OPERATOR):
        if (cap := attribute(node, "softcap", 0.0)) != 0:
            yield place_of(node, f"softcap {cap:g}")


def _precision(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, _OPERATOR):
        if (kind := attribute(node, "softmax_precision", 0)) != 0:
            yield place_of(node, f"softmax_precision {kind}")


def _both_masks(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, _OPERATOR):
        if attribute(node, "is_causal", 0) and _has(node, _MASK):
            yield place_of(node, "is_causal beside a mask")


def _sizes(node: ir.Node) -> tuple[int | None, int | None]:
    """Head sizes of queries and values, where they are known."""
    found: list[int | None] = []
    for place, heads in ((0, "q_num_heads"), (2, "kv_num_heads")):
        value = node.inputs[place]
        last = value.shape[-1] if value is not None and value.shape is not None else None
        if not isinstance(last, int):
            found.append(None)
            continue
        parts = (
            attribute(node, heads, 1) if value is not None and len(value.shape or ()) == 3 else 1
        )
        found.append(last // int(parts))
    return found[0], found[1]


def _wide_heads(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, _OPERATOR):
        size, _ = _sizes(node)
        if size is not None and size > LARGEST_HEAD:
            yield place_of(node, f"heads of {size}")


def _unequal_heads(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, _OPERATOR):
        size, value_size = _sizes(node)
        if None not in (size, value_size) and size != value_size:
            yield place_of(node, f"keys of {size}, values of {value_size}")


def _padding(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, _OPERATOR):
        if _has(node, _PADDING):
            yield place_of(node, "it has nonpad_kv_seqlen")


RULES = (
    GraphRule(
        name="attention-cache",
        check=_caches,
        why="TensorRT's parser takes Attention with one output only",
        cure=f"{_LOWER}, which keeps caches outside",
        answers=("INVALID_NODE",),
    ),
    GraphRule(
        name="attention-type",
        check=_types,
        why="there is no float32 kernel, and the operator is not taken apart",
        cure="export with --dtype fp16, or lower with `headport lower`, which writes out MatMul "
        "and Softmax for float32",
        answers=("builder",),
    ),
    GraphRule(
        name="attention-softcap",
        check=_softcap,
        why="TensorRT's Attention has no softcap",
        cure=f"{_LOWER}, which writes out MatMul and Softmax",
        answers=("UNSUPPORTED_NODE",),
    ),
    GraphRule(
        name="attention-precision",
        check=_precision,
        why="TensorRT's Attention chooses the precision of its softmax itself",
        cure=f"{_LOWER}, which does not set it",
        answers=("UNSUPPORTED_NODE",),
    ),
    GraphRule(
        name="attention-two-masks",
        check=_both_masks,
        why="TensorRT takes a mask or is_causal, not both",
        cure=f"{_LOWER}, whose mask is causal by itself",
        answers=("INVALID_NODE",),
    ),
    GraphRule(
        name="attention-wide-heads",
        check=_wide_heads,
        why=f"TensorRT's kernels end at heads of {LARGEST_HEAD}",
        cure=f"{_LOWER}, which writes out MatMul and Softmax",
        answers=("builder",),
    ),
    GraphRule(
        name="attention-unequal-heads",
        check=_unequal_heads,
        why="TensorRT's kernels want values as wide as keys",
        cure=f"{_LOWER}, which writes out MatMul and Softmax",
        answers=("INVALID_NODE",),
    ),
    GraphRule(
        name="attention-padding",
        check=_padding,
        why="TensorRT drops the lengths and attends to padding",
        cure=f"{_LOWER}, whose mask leaves padding out",
        answers=("silent",),
    ),
)
