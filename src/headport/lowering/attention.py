"""Attention as ONNX Runtime's fused operator with caches written in place.

    headport::CachedAttention…(q, k, v, past_key, past_value, attention_mask
                               [, sinks][, slopes][, relative])
      →  com.microsoft::GroupQueryAttention(q, k, v, past_key, past_value, seqlens_k,
             total_sequence_length, attention_bias = slopes · −distance or relative[distance],
             head_sink = sinks
             [, query_seqlens])

Rows are right-padded and caches compact, so a slot's index is its token's position and the mask
has nothing left to say. The operator wants heads whose size is a multiple of 8 and as wide for
keys as for values; others are padded with zeros, which change no product.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from headport.errors import LoweringError
from headport.lowering.alibi import linear_bias
from headport.lowering.emit import CONTRIB, Emitter, attribute, replace
from headport.lowering.in_place import graph_input
from headport.lowering.match import Match
from headport.lowering.relative import relative_bias

__all__ = [
    "CPU_KERNEL",
    "CPU_KERNEL_1_30",
    "CUDA_KERNEL",
    "AttentionKernel",
    "attention_calls",
    "attention_windows",
    "lower_attention",
]

# The function's names and signature are defined in headport/export/functions.py.
_FUNCTION = "CachedAttention"
_FEATURES = ("sinks", "slopes", "rounded", "relative", "softcap", "window")
_EXTRAS = ("sinks", "slopes", "relative")  # inputs behind those that every form has
_BIASES = {"slopes", "relative"}
_OPERATOR = "GroupQueryAttention"
_BIAS, _SINK, _QUERY_SEQLENS = 10, 11, 16  # places of its optional inputs
_SIZE_MULTIPLE = 8


@dataclass(frozen=True)
class AttentionKernel:
    """What a provider's operator can do."""

    provider: str
    dtypes: tuple[ir.DataType, ...]
    query_seqlens: bool  # it takes rows with different numbers of new tokens behind others
    bias_with_sinks: bool
    growing_dtypes: tuple[ir.DataType, ...] = ()  # what runs all the same, with growing caches


CPU_KERNEL = AttentionKernel("CPU", (ir.DataType.FLOAT, ir.DataType.FLOAT16), True, True)
# As in ONNX Runtime 1.30 and 1.31: their operator has no input `query_seqlens` yet.
CPU_KERNEL_1_30 = AttentionKernel("CPU", CPU_KERNEL.dtypes, False, True)
CUDA_KERNEL = AttentionKernel(
    "CUDA", (ir.DataType.FLOAT16,), False, False, growing_dtypes=(ir.DataType.FLOAT,)
)


@dataclass(frozen=True)
class _Layer:
    """One attention call: its inputs by name and its sizes."""

    call: ir.Node
    where: str
    features: frozenset[str]
    inputs: dict[str, ir.Value]
    heads: int
    kv_heads: int
    key_size: int
    value_size: int

    @property
    def size(self) -> int:
        """Head size in the caches: a multiple of 8 that holds keys and values."""
        return -(-max(self.key_size, self.value_size) // _SIZE_MULTIPLE) * _SIZE_MULTIPLE


def attention_windows(model: ir.Model) -> tuple[int, ...]:
    """Window of each layer of a portable backbone, 0 for none; it counts the token itself."""
    return tuple(int(attribute(call, "window", 0)) for call in attention_calls(model))


def lower_attention(model: ir.Model, kernel: AttentionKernel = CPU_KERNEL) -> list[Match]:
    """Replace every attention call.

    Args:
        model: A portable backbone with the inputs of a step; changed in place.
        kernel: What will run it.

    Raises:
        LoweringError: If one cannot be replaced, naming the layer: with caches in place for some
            layers and growing for others the backbone could not run.
    """
    layers = [_layer(call, index, kernel) for index, call in enumerate(attention_calls(model))]
    for layer in layers:
        _lower(model, layer, kernel)
    if layers:
        model.opset_imports[CONTRIB] = 1
    return [Match(layer.where, layer.call.op_type, _OPERATOR) for layer in layers]


def attention_calls(model: ir.Model) -> list[ir.Node]:
    """The attention calls of a portable backbone, layer by layer."""
    return [n for n in model.graph if n.domain == "headport" and n.op_type.startswith(_FUNCTION)]


def _layer(call: ir.Node, index: int, kernel: AttentionKernel) -> _Layer:
    where = f"attention layer {index}"
    base, *features = call.op_type.split("_")
    if base != _FUNCTION or not set(features) <= set(_FEATURES):
        raise LoweringError(f"{where}: headport::{call.op_type} is not an attention known here")
    names = ["q", "k", "v", "past_key", "past_value", "attention_mask"]
    names += [name for name in _EXTRAS if name in features]
    if len(call.inputs) != len(names) or None in call.inputs:
        raise LoweringError(f"{where}: {call.op_type} takes {', '.join(names)}")
    inputs = {n: v for n, v in zip(names, call.inputs, strict=True) if v is not None}
    for name in ("past_key", "past_value"):
        if not inputs[name].is_graph_input():
            raise LoweringError(
                f"{where}: its {name} is computed in the graph, so it cannot be updated in place"
            )
    for name in ("window", "softcap"):
        if (attribute(call, name, 0) > 0) != (name in features):
            raise LoweringError(
                f"{where}: {call.op_type} and its attribute {name} = {attribute(call, name, 0)} "
                "contradict each other"
            )
    heads = _dims(inputs["q"], where, "q")[1]
    _, kv_heads, _, key_size = _dims(inputs["past_key"], where, "past_key")
    value_size = _dims(inputs["past_value"], where, "past_value")[3]
    layer = _Layer(
        call,
        where,
        frozenset(features),
        inputs,
        *(_static(n, where) for n in (heads, kv_heads, key_size, value_size)),
    )
    if inputs["past_key"].dtype not in kernel.dtypes:
        known = " or ".join(dtype.name.lower() for dtype in kernel.dtypes)
        raise LoweringError(
            f"{where}: {known} was expected, {inputs['past_key'].dtype} found; "
            f"{_OPERATOR} computes in no other type on {kernel.provider}"
        )
    if "sinks" in layer.features and _BIASES & layer.features and not kernel.bias_with_sinks:
        raise LoweringError(
            f"{where}: it has both sinks and a bias, which {_OPERATOR} does not take together on "
            f"{kernel.provider}; run the portable bundle"
        )
    if layer.heads % layer.kv_heads:
        raise LoweringError(
            f"{where}: {layer.heads} query heads do not divide among {layer.kv_heads} key heads"
        )
    return layer


def _dims(value: ir.Value, where: str, name: str) -> ir.Shape:
    if value.shape is None or len(value.shape) != 4:
        raise LoweringError(f"{where}: the shape of its {name} is not known to have 4 dimensions")
    return value.shape


def _static(dim: int | ir.SymbolicDim, where: str) -> int:
    if not isinstance(dim, int):
        raise LoweringError(f"{where}: the number or size of its heads is not a constant")
    return dim


def _lower(model: ir.Model, layer: _Layer, kernel: AttentionKernel) -> None:
    graph, call, given = model.graph, layer.call, layer.inputs
    emit = Emitter(graph, call, layer.where.replace("attention layer ", "attention."))
    inputs: list[ir.Value | None] = [None] * (_QUERY_SEQLENS + kernel.query_seqlens)
    for place, name, size in (
        (0, "q", layer.key_size),
        (1, "k", layer.key_size),
        (2, "v", layer.value_size),
    ):
        inputs[place] = _rows(emit, given[name], name, layer.size - size)
    inputs[3:7] = [
        given["past_key"],
        given["past_value"],
        graph_input(model, "seqlens_k"),
        graph_input(model, "total_sequence_length"),
    ]
    if "slopes" in layer.features:
        scale = float(attribute(call, "scale", 1.0))
        rounded = scale if "rounded" in layer.features else None
        inputs[_BIAS] = linear_bias(model, emit, given["slopes"], given["q"], rounded)
    if "relative" in layer.features:
        inputs[_BIAS] = relative_bias(model, given["relative"], given["q"], call)
    if "sinks" in layer.features:
        inputs[_SINK] = emit.op("CastLike", [given["sinks"], given["q"]], "sinks")
    if kernel.query_seqlens:
        inputs[_QUERY_SEQLENS] = graph_input(model, "query_seqlens")
    while inputs[-1] is None:
        inputs.pop()
    attributes = {
        "num_heads": layer.heads,
        "kv_num_heads": layer.kv_heads,
        "scale": float(attribute(call, "scale", 1.0)),
    }
    if "window" in layer.features:
        attributes["local_window_size"] = int(attribute(call, "window", 0))
    if "softcap" in layer.features:
        attributes["softcap"] = float(attribute(call, "softcap", 0.0))
    y, present_key, present_value = emit.ops(
        _OPERATOR, inputs, ("y", "present_key", "present_value"), domain=CONTRIB, **attributes
    )
    rows = given["q"].shape
    assert rows is not None
    y.shape = ir.Shape([rows[0], rows[2], layer.heads * layer.size])
    y.type = given["q"].type
    y = emit.op("Reshape", [y, emit.ints(0, 0, layer.heads, layer.size)], "y_heads")
    if layer.size != layer.value_size:
        cut = [emit.ints(0), emit.ints(layer.value_size), emit.ints(3)]
        y = emit.op("Slice", [y, *cut], "y_cut")
    replace(graph, call, [y, present_key, present_value])
    for name in ("past_key", "past_value"):
        dims = list(given[name].shape or ())
        given[name].shape = ir.Shape([*dims[:3], layer.size])


def _rows(emit: Emitter, value: ir.Value, name: str, missing: int) -> ir.Value:
    # [B, heads, T, D] → [B, T, heads · size], each head filled up with zeros.
    shape, kind = value.shape, value.type
    if missing:
        # All axes are named by place: ONNX Runtime 1.32 moves a Transpose across a Pad that lists
        # its axes without adapting the list, and then fails.
        pads = emit.ints(0, 0, 0, 0, 0, 0, 0, missing)
        value = emit.op("Pad", [value, pads], f"{name}_padded")
    swapped = emit.op("Transpose", [value], f"{name}_rows", perm=[0, 2, 1, 3])
    flat = emit.op("Reshape", [swapped, emit.ints(0, 0, -1)], f"{name}_flat")
    assert shape is not None
    batch, heads, sequence, size = shape
    flat.type = kind
    flat.shape = ir.Shape([batch, sequence, heads * (size + missing)])
    return flat
