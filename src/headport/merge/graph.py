"""Backbone and head as one graph.

backbone: input_ids, … → hidden_states, present
head:     hidden_states [N, H] → logits [N, V]
  →  input_ids, … → logits [B, T, V], present

hidden [B, T, H] → Reshape [B·T, H] → head → Reshape [B, T, V]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from headport.errors import MergeError
from headport.lowering.emit import Emitter, replace

__all__ = ["join_head", "mask_from_lengths", "store_once", "take_position_ids"]

_PREFIX = "merge"
_POSITIONS = ("headport", "Positions")
_STEP_INPUTS = ("seqlens_k", "query_seqlens", "total_sequence_length")


def join_head(backbone: ir.Model, head: ir.Model) -> ir.Model:
    """Append a head to a backbone; both are used up.

    Args:
        backbone: Gives `hidden_states` [batch, sequence, H], kept nowhere else afterwards.
        head: Takes `hidden_states` [N, H] and gives `logits` [N, V] first.

    Returns:
        The backbone's model: its first output is `logits` float32 [batch, sequence, V].

    Raises:
        MergeError: If the two declare different versions of an operator set or of a function.
    """
    graph = backbone.graph
    _share_definitions(backbone, head)
    hidden = _port(graph.outputs, "hidden_states")
    given, flat = head.graph.inputs[0], _port(head.graph.outputs, "logits")
    assert flat.shape is not None and flat.dtype is not None and hidden.shape is not None
    width, size = flat.shape[1], hidden.shape[2]
    assert isinstance(width, int) and isinstance(size, int)
    _move(head.graph, graph)
    # Everything goes in front of the last node; sorting puts it in order.
    emit = Emitter(graph, graph[-1], _PREFIX)
    rows = emit.op("Reshape", [hidden, emit.ints(-1, size)], "hidden_rows")
    rows.type, rows.shape = hidden.type, ir.Shape(["rows", size])
    ir.convenience.replace_all_uses_with(given, rows)
    leading = emit.op("Shape", [hidden], "batch_and_sequence", start=0, end=2)
    shape = emit.op("Concat", [leading, emit.ints(width)], "logits_shape", axis=0)
    flat.name = f"{_PREFIX}.logit_rows"
    logits = emit.op("Reshape", [flat, shape], "logits")
    logits.name = "logits"
    logits.type = ir.TensorType(flat.dtype)
    logits.shape = ir.Shape(["batch", "sequence", width])
    graph.outputs[list(graph.outputs).index(hidden)] = logits
    hidden.name = f"{_PREFIX}.hidden_states"
    graph.sort()
    graph.name = "model"
    return backbone


def _share_definitions(backbone: ir.Model, head: ir.Model) -> None:
    for domain, version in head.opset_imports.items():
        if backbone.opset_imports.setdefault(domain, version) != version:
            raise MergeError(
                f"the head uses operator set {domain or 'ai.onnx'} {version}, the backbone "
                f"{backbone.opset_imports[domain]}; export the checkpoint again"
            )
    for key, function in head.functions.items():
        if key in backbone.functions:
            raise MergeError(f"backbone and head both define {key}; export the checkpoint again")
        backbone.functions[key] = function


def _port(values: Sequence[ir.Value], name: str) -> ir.Value:
    for value in values:
        if value.name == name:
            return value
    raise MergeError(
        f"a graph with a port {name!r} was expected; it has {[v.name for v in values]}"
    )


def _move(source: ir.Graph, target: ir.Graph) -> None:
    # Nodes and initialisers change graphs; names that both use get the head's own prefix.
    taken = {v.name for n in target for v in n.outputs}
    taken |= {*target.initializers, *(v.name for v in target.inputs)}
    nodes_taken = {node.name for node in target}
    nodes = list(source)
    source.outputs.clear()
    source.remove(nodes)
    for name in list(source.initializers):
        value = source.initializers.pop(name)
        value.name = f"head.{name}" if name in taken else name
        target.register_initializer(value)
    for node in nodes:
        if node.name and node.name in nodes_taken:
            node.name = f"head.{node.name}"
        for value in node.outputs:
            if value.name in taken:
                value.name = f"head.{value.name}"
    target.extend(nodes)


def take_position_ids(model: ir.Model) -> bool:
    """Make positions an input instead of computing them from the mask; whether there were any.

    headport::Positions(attention_mask, input_ids)  →  position_ids int64 [batch, sequence]
    """
    graph = model.graph
    calls = [node for node in graph if (node.domain, node.op_type) == _POSITIONS]
    if not calls:
        return False
    given = ir.val("position_ids", ir.DataType.INT64, ("batch", "sequence"))
    graph.inputs.insert(2, given)
    for call in calls:
        replace(graph, call, [given])
    common_passes.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    return True


def mask_from_lengths(model: ir.Model) -> None:
    """Compute the lengths that an `ort-cpu` backbone takes from an attention mask.

        attention_mask int64 [B, S], input_ids [B, T], past [B, KV, C, D]
          →  seqlens_k = max(Σ mask − 1, 0)             [B]
             query_seqlens = Σ mask[:, S − T:]          [B]
             total_sequence_length = max(C, S)

    Rows are padded on the right. C is the capacity where caches are buffers shared between steps,
    and the past's length where they grow.
    """
    graph = model.graph
    ids, past = graph.inputs[0], next(v for v in graph.inputs if ".key" in (v.name or ""))
    mask = ir.val("attention_mask", ir.DataType.INT64, ("batch", "total_sequence"))
    steps = [_port(graph.inputs, name) for name in _STEP_INPUTS]
    emit = Emitter(graph, graph[0], _PREFIX)
    zero, one, axis = emit.scalar(0, np.int64), emit.scalar(1, np.int64), emit.ints(1)
    tokens = emit.op("ReduceSum", [mask, axis], "tokens_after", keepdims=0)
    last = emit.op("Max", [emit.op("Sub", [tokens, one], "last_token"), zero], "last_slot")
    width = emit.op("Shape", [ids], "width", start=1, end=2)
    slots = emit.op("Shape", [mask], "mask_width", start=1, end=2)
    before = emit.op("Sub", [slots, width], "past_slots")
    newest = emit.op("Slice", [mask, before, slots, axis], "new_mask")
    new = emit.op("ReduceSum", [newest, axis], "new_tokens", keepdims=0)
    capacity = emit.op("Shape", [past], "capacity", start=2, end=3)
    total = emit.op("Squeeze", [emit.op("Max", [capacity, slots], "slots")], "slots.scalar")
    for old, wide in zip(steps, (last, new, total), strict=True):
        narrow = emit.op("Cast", [wide], f"{old.name}.int32", to=ir.DataType.INT32)
        ir.convenience.replace_all_uses_with(old, narrow)
        graph.inputs.remove(old)
    graph.inputs.insert(1, mask)


def store_once(model: ir.Model) -> int:
    """Let tensors that lie at the same place on disk be one initialiser; how many were dropped.

    A tied weight is one entry of the bundle's data, read by the backbone and by the head.
    """
    graph, dropped = model.graph, 0
    kept: dict[tuple[object, ...], ir.Value] = {}
    for name in list(graph.initializers):
        value = graph.initializers[name]
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        shape = tuple(tensor.shape.numpy())
        place = (str(tensor.path), tensor.offset, tensor.dtype, shape)
        first = kept.setdefault(place, value)
        if first is not value:
            ir.convenience.replace_all_uses_with(value, first)
            del graph.initializers[name]
            dropped += 1
    return dropped
