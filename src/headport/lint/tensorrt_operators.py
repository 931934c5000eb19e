"""Operators, types and sizes that TensorRT has no kernel for."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from headport.lint.findings import GraphRule, Place, constant_of, nodes_of, place_of
from headport.lowering.emit import CONTRIB
from headport.lowering.tensorrt.top import LARGEST_TOP_K

__all__ = ["RULES"]

# By domain.
_UNKNOWN = {
    "": (
        *("MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv", "DynamicQuantizeLinear"),
        *("Multinomial", "Bernoulli"),
    ),
    CONTRIB: (
        # MatMulNBits is a plugin that the package does not bring.
        *("MatMulNBits", "DynamicQuantizeMatMul", "GatherBlockQuantized", "MoE"),
    ),
}
_PRODUCTS = ("Gemm", "MatMul")
_LOWER = "use a portable bundle: `headport lint` and `headport engine` lower it themselves"


def _operators(model: ir.Model) -> Iterator[Place]:
    for domain, names in _UNKNOWN.items():
        for node in nodes_of(model, *names, domain=domain):
            yield place_of(node, f"{domain + '::' if domain else ''}{node.op_type}")


def _mixed(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, *_PRODUCTS):
        types = {v.dtype for v in node.inputs if v is not None and v.dtype is not None}
        if len(types) > 1:
            found = " and ".join(sorted(t.name.lower() for t in types))
            yield place_of(node, f"{node.op_type} of {found}")


def _large_top(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, "TopK"):
        count = constant_of(node.inputs[1])
        if count is not None and int(count.reshape(-1)[0]) > LARGEST_TOP_K:
            yield place_of(node, f"K = {int(count.reshape(-1)[0])}")


def _computed_top(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, "TopK"):
        if constant_of(node.inputs[1]) is None:
            yield place_of(node, "K is not a constant")


def _doubles(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, "Cast", "Constant"):
        if _is_double(node):
            yield place_of(node, "it gives float64")


def _is_double(node: ir.Node) -> bool:
    if node.op_type == "Cast":
        return bool(node.attributes["to"].as_int() == ir.DataType.DOUBLE)
    value = constant_of(node.outputs[0])
    return value is not None and value.dtype.name == "float64"


RULES = (
    GraphRule(
        name="no-kernel",
        check=_operators,
        why="TensorRT has no kernel for it",
        cure=_LOWER,
        answers=("UNSUPPORTED_NODE", "INVALID_NODE"),
    ),
    GraphRule(
        name="mixed-product",
        check=_mixed,
        why="TensorRT takes both factors of a product in one type",
        cure="export with --dtype fp16 or fp32; both sides then have it",
        answers=("INVALID_NODE",),
    ),
    GraphRule(
        name="large-top-k",
        check=_large_top,
        why=f"TensorRT's TopK ends at {LARGEST_TOP_K}",
        cure=f"lower with --top-k {LARGEST_TOP_K} or less, or take the logits and cut them outside",
        answers=("builder",),
    ),
    GraphRule(
        name="computed-top-k",
        check=_computed_top,
        why="the builder takes it as long as no profile makes it larger than its limit",
        cure="lower with --top-k, which fixes it",
        answers=("silent",),
        severity="warning",
    ),
    GraphRule(
        name="float64",
        check=_doubles,
        why="TensorRT computes it in float32 without a word",
        cure="quantise without --rescore and --certify, whose candidates are scored in it",
        answers=("silent",),
    ),
)
