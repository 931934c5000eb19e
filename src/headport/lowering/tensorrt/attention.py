"""Attention as TensorRT has kernels for it, with caches that go in and come out.

    headport::CachedAttention…(q, k, v, past_key, past_value, attention_mask[, slopes])
      →  present_key = Concat(past_key, k),  present_value = Concat(past_value, v)
         Transpose(Attention(q, present_key, present_value, mask))

    mask [B, 1, T, S] = 0 where a query may look, −32768 elsewhere;  + slope · −distance

The mask is added and finite: a boolean one, or `is_causal` beside a mask, is refused or gives NaN
for padding, which may look nowhere. TensorRT's Attention exists in half precision alone, without
softcap and sinks, and for heads of up to 256 that are as wide for keys as for values; any other
layer keeps the function's own MatMul and Softmax, which are written out.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from headport.errors import LoweringError
from headport.lowering.attention import attention_calls
from headport.lowering.emit import Emitter, attribute, replace
from headport.lowering.in_place import graph_input
from headport.lowering.match import Match

__all__ = ["LARGEST_HEAD", "lower_attention", "write_out_functions"]

LARGEST_HEAD = 256
_OPERATOR = "Attention"
_INPUTS = ("q", "k", "v", "past_key", "past_value", "attention_mask")
_UNFUSED = ("softcap", "sinks", "rounded")  # features that its Attention does not have
# Half of float16's range: with any score below it a sum stays finite, and exp of it is 0.
_NOWHERE = -32768.0
_TYPES = (ir.DataType.FLOAT16,)


def lower_attention(model: ir.Model) -> list[Match]:
    """Replace every attention call that TensorRT has a kernel for.

    Args:
        model: A portable backbone; changed in place.

    Raises:
        LoweringError: If a call is not one that is known here.
    """
    masks: dict[tuple[int, str], ir.Value] = {}
    matches = []
    for index, call in enumerate(attention_calls(model)):
        where, was = f"attention layer {index}", call.op_type
        features = call.op_type.split("_")[1:]
        inputs = dict(zip((*_INPUTS, *_extra(features)), call.inputs, strict=False))
        if len(inputs) != len(call.inputs) or None in inputs.values():
            raise LoweringError(f"{where}: {', '.join(_INPUTS)} were expected as inputs of {was}")
        reason = _unfused(features, inputs)
        if reason is not None:
            matches.append(Match(where, was, None, f"MatMul and Softmax: {reason}"))
            continue
        call.name = f"headport.attention.{index}"
        _lower(model, call, inputs, masks)  # type: ignore[arg-type]
        matches.append(Match(where, was, _OPERATOR))
    return matches


def _extra(features: list[str]) -> list[str]:
    return [name for name in ("sinks", "slopes") if name in features]


def _unfused(features: list[str], inputs: dict[str, ir.Value | None]) -> str | None:
    """Why TensorRT's Attention cannot compute a layer; None where it can."""
    key, value = inputs["past_key"], inputs["past_value"]
    assert key is not None and value is not None
    if key.dtype not in _TYPES:
        name = "an unknown type" if key.dtype is None else key.dtype.name.lower()
        return f"TensorRT's Attention computes in float16, not in {name}"
    if found := [name for name in _UNFUSED if name in features]:
        return f"TensorRT's Attention has no {', '.join(found)}"
    sizes = [_head_size(key), _head_size(value)]
    if sizes[0] != sizes[1] or not 0 < sizes[0] <= LARGEST_HEAD:
        return f"its heads are not equally wide for keys and values, and at most {LARGEST_HEAD}"
    return None


def _head_size(past: ir.Value) -> int:
    size = past.shape[3] if past.shape is not None and len(past.shape) == 4 else None
    return size if isinstance(size, int) else 0


def _lower(
    model: ir.Model,
    call: ir.Node,
    inputs: dict[str, ir.Value],
    masks: dict[tuple[int, str], ir.Value],
) -> None:
    graph = model.graph
    window = int(attribute(call, "window", 0))
    slopes = inputs.get("slopes")
    key = (window, "" if slopes is None else slopes.name or "")
    if key not in masks:
        masks[key] = _mask(model, call, window, slopes, len(masks))
    emit = Emitter(graph, call, call.name or "")
    present = [
        emit.op("Concat", [inputs[past], inputs[new]], name, axis=2)
        for past, new, name in (
            ("past_key", "k", "keys"),
            ("past_value", "v", "values"),
        )
    ]
    # `scale` of 0 would mean the operator's own default.
    scale = float(attribute(call, "scale", 0.0))
    attended = emit.op(_OPERATOR, [inputs["q"], *present, masks[key]], "attended", scale=scale)
    y = emit.op("Transpose", [attended], "y", perm=[0, 2, 1, 3])
    replace(graph, call, [y, *present])


def _mask(
    model: ir.Model, call: ir.Node, window: int, slopes: ir.Value | None, number: int
) -> ir.Value:
    """What is added to scores: [B, 1, T, S], or [B, Hq, T, S] with slopes; float16."""
    emit = Emitter(model.graph, call, f"headport.mask.{number}")
    attention_mask = call.inputs[_INPUTS.index("attention_mask")]
    key = call.inputs[_INPUTS.index("past_key")]
    assert attention_mask is not None and key is not None and key.dtype is not None
    dtype = key.dtype.numpy().type
    # Distances count valid tokens, so that padding on either side moves nothing.
    counted = emit.op("CumSum", [attention_mask, emit.scalar(1, np.int64)], "counted")
    slots = emit.op("Shape", [attention_mask], "slots", start=1, end=2)
    new = emit.op("Shape", [graph_input(model, "input_ids")], "new", start=1, end=2)
    held = emit.op("Sub", [slots, new], "held")
    own = emit.op("Slice", [counted, held, slots, emit.ints(1)], "own")
    queries = emit.op("Unsqueeze", [own, emit.ints(1, 3)], "queries")
    keys = emit.op("Unsqueeze", [counted, emit.ints(1, 2)], "keys")
    distance = emit.op("Sub", [queries, keys], "distance")
    holds = emit.op("Cast", [attention_mask], "holds", to=ir.DataType.BOOL)
    allowed = emit.op(
        "And",
        [
            emit.op("GreaterOrEqual", [distance, emit.scalar(0, np.int64)], "past"),
            emit.op("Unsqueeze", [holds, emit.ints(1, 2)], "valid"),
        ],
        "causal",
    )
    if window:
        near = emit.op("Less", [distance, emit.scalar(window, np.int64)], "near")
        allowed = emit.op("And", [allowed, near], "allowed")
    seen: ir.Value = emit.scalar(0.0, dtype)
    if slopes is not None:
        behind = emit.op("Cast", [emit.op("Neg", [distance], "behind")], "b", to=ir.DataType.FLOAT)
        wide = emit.op("Cast", [slopes], "slopes.float", to=ir.DataType.FLOAT)
        column = emit.op("Unsqueeze", [wide, emit.ints(0, 2, 3)], "slopes.column")
        # Of a padded slot the distance has no meaning, and no bound.
        linear = emit.op("Mul", [column, behind], "linear")
        bounded = emit.op("Max", [linear, emit.scalar(_NOWHERE, np.float32)], "bounded")
        seen = emit.op("Cast", [bounded], "bias", to=key.dtype)
    return emit.op("Where", [allowed, seen, emit.scalar(_NOWHERE, dtype)], "added")


def write_out_functions(model: ir.Model) -> list[Match]:
    """Put the bodies of `headport` functions in place of their calls."""
    common_passes.InlinePass()(model)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.RemoveUnusedOpsetsPass()(model)
    return []
