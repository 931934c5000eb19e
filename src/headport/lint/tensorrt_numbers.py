"""Numbers that half precision cannot hold."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from headport.lint.findings import GraphRule, Place, constant_of, nodes_of, place_of

__all__ = ["LARGEST_HALF", "RULES"]

LARGEST_HALF = 65504.0
_SMALL_BYTES = 1 << 20  # constants beyond it are weights, which the exporter has looked at


def _infinite(model: ir.Model) -> Iterator[Place]:
    for name, value in _constants(model):
        array = constant_of(value)
        if array is not None and array.dtype == np.float16 and not np.isfinite(array).all():
            yield Place(name, f"a float16 constant holds {_odd(array)}")


def _odd(array: np.ndarray[tuple[int, ...], np.dtype[np.float16]]) -> str:
    return "NaN" if np.isnan(array).any() else "infinity"


def _overflowing(model: ir.Model) -> Iterator[Place]:
    for node in nodes_of(model, "Cast", "CastLike"):
        array = constant_of(node.inputs[0])
        if array is None or array.dtype not in (np.float32, np.float64):
            continue
        if _to_half(node) and np.abs(array[np.isfinite(array)]).max(initial=0.0) > LARGEST_HALF:
            yield place_of(node, f"it narrows constants of up to {np.abs(array).max():g}")


def _to_half(node: ir.Node) -> bool:
    if node.op_type == "Cast":
        return bool(node.attributes["to"].as_int() == ir.DataType.FLOAT16)
    like = node.inputs[1]
    return like is not None and like.dtype == ir.DataType.FLOAT16


def _constants(model: ir.Model) -> Iterator[tuple[str, ir.Value]]:
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.nbytes <= _SMALL_BYTES:
                yield value.name or "", value
    for node in nodes_of(model, "Constant"):
        yield node.name or node.outputs[0].name or "Constant", node.outputs[0]


RULES = (
    GraphRule(
        name="infinite-constant",
        check=_infinite,
        why="the builder takes it, and a row that is masked throughout becomes NaN",
        cure="export again; headport masks with finite numbers",
        answers=("silent",),
    ),
    GraphRule(
        name="overflowing-constant",
        check=_overflowing,
        why=f"float16 ends at {LARGEST_HALF:g}, and the builder says nothing",
        cure="export with --dtype fp32, or bring the constant into range",
        answers=("silent",),
    ),
)
