"""The best K tokens of a row, in the graph, so that a GPU hands over K numbers and not V.

    logits [N, V]  →  + top_logits, top_ids = TopK(logits, K)   [N, K], the largest first
                      + logsumexp = m + log Σ exp(logits − m)   [N], m the largest logit

`top_ids` are original ids: in a pruned bundle they go through its id map. Equal logits come lowest
id first on ONNX Runtime; TensorRT promises no order among them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.errors import LoweringError
from headport.lowering.emit import Emitter

__all__ = ["LARGEST_TOP_K", "add_top"]

LARGEST_TOP_K = 3840  # of TensorRT's TopK
_INT64, _FLOAT = ir.DataType.INT64, ir.DataType.FLOAT


def add_top(model: ir.Model, count: int, original_ids: npt.NDArray[np.int64] | None) -> None:
    """Give a head's graph the outputs `top_logits`, `top_ids` and `logsumexp` beside its logits.

    Args:
        model: A head's graph with the output `logits` [rows, V]; changed in place.
        count: K.
        original_ids: [V], the original id of each row of the head; None: its own number.

    Raises:
        LoweringError: If K is not from 1 to V, or more than TensorRT takes.
    """
    graph = model.graph
    logits = next(value for value in graph.outputs if value.name == "logits")
    assert logits.shape is not None and isinstance(logits.shape[1], int)
    largest = min(LARGEST_TOP_K, logits.shape[1])
    if not 1 <= count <= largest:
        raise LoweringError(
            f"--top-k {count}: 1 to {largest} were expected: the head gives {logits.shape[1]} "
            f"logits, and TensorRT's TopK at most {LARGEST_TOP_K}"
        )
    end = ir.node("Identity", [logits])  # what nodes are put in front of
    graph.append(end)
    emit = Emitter(graph, end, "top")
    best, ids = emit.ops("TopK", [logits, emit.ints(count)], ("logits", "ids"), axis=1)
    if original_ids is not None:
        name = "headport.original_ids"
        value = ir.val(name, const_value=ir.tensor(original_ids, name=name))
        graph.register_initializer(value)
        ids = emit.op("Gather", [value, ids], "original")
    first = emit.op("Slice", [best, emit.ints(0), emit.ints(1), emit.ints(1)], "largest")
    mass = emit.op("Exp", [emit.op("Sub", [logits, first], "below")], "mass")
    total = emit.op("ReduceSum", [mass, emit.ints(1)], "total", keepdims=0)
    flat = emit.op("Squeeze", [first, emit.ints(1)], "largest.flat")
    logsumexp = emit.op("Add", [flat, emit.op("Log", [total], "log")], "logsumexp")
    graph.remove(end, safe=True)
    rows = logits.shape[0]
    for value, name, dtype, shape in (
        (best, "top_logits", _FLOAT, [rows, count]),
        (ids, "top_ids", _INT64, [rows, count]),
        (logsumexp, "logsumexp", _FLOAT, [rows]),
    ):
        value.name, value.dtype, value.shape = name, dtype, ir.Shape(shape)
        graph.outputs.append(value)
