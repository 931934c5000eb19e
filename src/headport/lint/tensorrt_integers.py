"""What TensorRT makes of integers and other narrow types."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from headport.lint.findings import GraphRule, Place, constant_of, nodes_of, place_of

__all__ = ["RULES"]

_PAIRS = ("DequantizeLinear", "QuantizeLinear")
_UNSIGNED = (ir.DataType.UINT8, ir.DataType.UINT4, ir.DataType.UINT16)
_NARROW = (ir.DataType.INT8, ir.DataType.INT4, ir.DataType.FLOAT8E4M3FN)
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_PRODUCTS = ("Gemm", "MatMul")
_TELLING_BYTES = 4096  # smaller constants may be widened without harm


def _zero_points(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, *_PAIRS):
        zero = node.inputs[2] if len(node.inputs) > 2 else None
        if zero is None or zero.dtype in _UNSIGNED:
            continue
        values = constant_of(zero)
        if values is None:
            yield place_of(node, "its zero point is not a constant")
        elif values.astype("float32").any():
            yield place_of(node, "its zero points are not all 0")


def _negative_scales(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, *_PAIRS):
        values = constant_of(node.inputs[1])
        if values is not None and not (values.astype("float32") > 0).all():
            yield place_of(node, "not all of its scales are above 0")


def _unsigned(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, "DequantizeLinear"):
        stored = node.inputs[0]
        if stored is not None and stored.dtype in _UNSIGNED:
            yield place_of(node, f"it restores {stored.dtype.name.lower()}")
    for node in nodes_of(model, "QuantizeLinear"):
        if node.outputs[0].dtype in _UNSIGNED or _rounds_unsigned(node):
            yield place_of(node, "it rounds to unsigned integers")


def _rounds_unsigned(node: ir.Node) -> bool:
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    if zero is not None:
        return zero.dtype in _UNSIGNED
    return "output_dtype" not in node.attributes  # uint8 where nothing says otherwise


def _loose_integers(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model):
        if node.op_type in _PAIRS and not node.domain:
            continue
        for value in node.inputs:
            if value is not None and value.is_initializer() and value.dtype in _NARROW:
                kind = value.dtype.name.lower()
                yield place_of(node, f"{node.op_type} reads the {kind} constant {value.name}")


def _widened(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, *_PRODUCTS):
        given = node.inputs[1]
        cast = given.producer() if given is not None else None
        if cast is None or cast.op_type != "Cast" or cast.inputs[0] is None:
            continue
        stored = cast.inputs[0]
        size = stored.const_value.nbytes if stored.const_value is not None else 0
        if stored.dtype in _HALVES and size >= _TELLING_BYTES:
            yield place_of(node, f"it reads {stored.name} widened to float32")


RULES = (
    GraphRule(
        name="zero-points",
        check=_zero_points,
        why="TensorRT restores integers without zero points",
        cure="quantise without --asymmetric; int4 with --positive-scales",
        answers=("INVALID_NODE",),
    ),
    GraphRule(
        name="negative-scales",
        check=_negative_scales,
        why="TensorRT's parser wants every scale above 0; TensorRT-RTX's takes others, unproved",
        cure="quantise the head alone, with --positive-scales where it is int4",
        answers=("silent",),
    ),
    GraphRule(
        name="unsigned-integers",
        check=_unsigned,
        why="TensorRT has no unsigned integers",
        cure="quantise with --head int8, int8-row, or int4 --positive-scales",
        answers=("UNSUPPORTED_NODE", "INVALID_GRAPH", "INVALID_NODE"),
    ),
    GraphRule(
        name="loose-integers",
        check=_loose_integers,
        why="TensorRT takes narrow constants in DequantizeLinear alone",
        cure="quantise with `headport quantize`, which writes DequantizeLinear",
        answers=("builder",),
    ),
    GraphRule(
        name="widened-weight",
        check=_widened,
        why="the builder folds the Cast, so the plan holds the weight in float32, twice as large",
        cure="export with --dtype fp16, so that products are in half precision as well",
        answers=("silent",),
        severity="warning",
    ),
)
