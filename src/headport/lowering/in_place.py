"""Ports of a backbone whose caches are fixed buffers that are updated in place.

    input_ids, attention_mask, past (growing) → hidden_states, present
      →  input_ids, seqlens_k, query_seqlens, total_sequence_length, past (fixed)
         → hidden_states, present (the same buffers)

With fixed buffers the length of `past` is their capacity, so nothing may depend on it any more,
nor on a mask that no longer exists: what does is refused, because it would be wrong in silence.
A kernel that takes no `query_seqlens` gets `position_ids` instead, from the caller.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from headport.cache_ports import (
    SOURCE_MASK,
    is_cross,
    is_past,
    is_present,
    is_state,
    present_name,
)
from headport.errors import LoweringError
from headport.given_rows import EMBEDDING_ROWS, EMBEDDINGS
from headport.lowering.emit import CONTRIB, attribute
from headport.lowering.experts import EXPERTS
from headport.lowering.match import Match

__all__ = [
    "RAGGED_STEP",
    "RECURRENCES",
    "SOURCE_ATTENTION",
    "UNIFORM_STEP",
    "add_step_inputs",
    "drop_growing_inputs",
    "graph_input",
    "past_ports",
]

# Functions of recurrent layers, headport/export/recurrent_functions.py: they read no mask and no
# growing cache, and may stay. The name of the first goes on with the width of its kernel.
RECURRENCES = (
    "CausalConvolution",
    "SelectiveScan",
    "StateSpaceDual",
    "GatedDeltaRule",
    "LinearRecurrence",
)

# Attention to a source, headport/export/source_function.py: it reads the same in every step.
SOURCE_ATTENTION = "SourceAttention"

_StepInputs = dict[str, tuple[ir.DataType, tuple[str, ...]]]

_SEQLENS = (ir.DataType.INT32, ("batch",))  # tokens in the cache after the step, minus one
_SLOTS = (ir.DataType.INT32, ())

# Inputs of a step, by name. Ragged: every row has its own number of new tokens.
RAGGED_STEP: _StepInputs = {
    "seqlens_k": _SEQLENS,
    "query_seqlens": (ir.DataType.INT32, ("batch",)),  # new tokens of each row
    "total_sequence_length": _SLOTS,  # slots of the cache
}
# Uniform: every row has as many as the step is wide, but for a first one, which may be shorter.
UNIFORM_STEP: _StepInputs = {
    "position_ids": (ir.DataType.INT64, ("batch", "sequence")),
    "seqlens_k": _SEQLENS,
    "total_sequence_length": _SLOTS,  # largest number of tokens in a row after the step
}
_MASK, _IDS = "attention_mask", "input_ids"


def graph_input(model: ir.Model, name: str) -> ir.Value:
    """A graph input by name.

    Raises:
        LoweringError: If the graph has none of that name.
    """
    for value in model.graph.inputs:
        if value.name == name:
            return value
    raise LoweringError(f"the backbone has no input {name!r}; a portable backbone was expected")


def past_ports(model: ir.Model) -> list[ir.Value]:
    """The inputs that hold keys and values, in graph order."""
    return [v for v in _caches(model) if not is_state(v.name or "")]


def _caches(model: ir.Model) -> list[ir.Value]:
    return [v for v in model.graph.inputs if is_past(v.name or "")]


def add_step_inputs(model: ir.Model, inputs: _StepInputs = RAGGED_STEP) -> list[Match]:
    """Declare the inputs that describe a step, behind `input_ids`."""
    graph = model.graph
    expected = {
        _IDS,
        _MASK,
        SOURCE_MASK,
        EMBEDDINGS,
        EMBEDDING_ROWS,
        *(v.name for v in _caches(model)),
    }
    expected |= {v.name for v in graph.inputs if is_cross(v.name or "")}
    odd = sorted(str(v.name) for v in graph.inputs if v.name not in expected)
    if odd:
        raise LoweringError(
            f"the backbone has inputs that in-place caches cannot serve: {', '.join(odd)}"
        )
    after = list(graph.inputs).index(graph_input(model, _IDS)) + 1
    for name, (dtype, shape) in reversed(inputs.items()):
        graph.inputs.insert(after, ir.val(name, dtype, shape))
    return []


def drop_growing_inputs(model: ir.Model) -> list[Match]:
    """Remove `attention_mask`, fix the caches' shapes, and refuse what depended on either.

    Raises:
        LoweringError: If a node still reads the mask, the past's length, or the presents.
    """
    graph = model.graph
    mask, ids = graph_input(model, _MASK), graph_input(model, _IDS)
    faults: list[str] = []
    for value in (mask, *past_ports(model)):
        for node in [use.node for use in value.uses()]:
            if _is_batch_size(node):
                node.replace_input_with(0, ids)
            elif not _is_allowed(node, value):
                faults.append(f"{node.op_type} reads {value.name}")
    for value in graph.outputs:
        if is_present(value.name or "") and not is_state(value.name or ""):
            faults += [f"{use.node.op_type} reads {value.name}" for use in value.uses()]
            if not _is_fused(value.producer()):
                faults.append(f"{value.name} is not written by GroupQueryAttention")
    faults += [
        f"{n.domain}::{n.op_type} is left"
        for n in graph
        if n.domain == "headport" and not _keeps_nothing(n)
    ]
    if faults:
        shown = "; ".join(sorted(set(faults))[:6])
        raise LoweringError(
            "the backbone would still depend on the attention mask or the length of the past, "
            f"which in-place caches do not have: {shown}"
        )
    graph.inputs.remove(mask)
    for past, present in _pairs(model):
        present.shape = past.shape
    return []


def _is_batch_size(node: ir.Node) -> bool:
    bounds = (attribute(node, "start", 0), attribute(node, "end", None))
    return node.op_type == "Shape" and bounds == (0, 1)


def _is_allowed(node: ir.Node, value: ir.Value) -> bool:
    if _is_fused(node):
        return True
    # Heads and head size are the same for a growing and a fixed cache.
    bounds = (attribute(node, "start", 0), attribute(node, "end", None))
    return node.op_type == "Shape" and value.name != _MASK and bounds in ((1, 2), (3, 4), (3, None))


def _keeps_nothing(node: ir.Node) -> bool:
    # Functions that may stay: they see neither the mask nor a growing cache.
    return node.op_type.startswith((*RECURRENCES, EXPERTS, SOURCE_ATTENTION))


def _is_fused(node: ir.Node | None) -> bool:
    return node is not None and (node.domain, node.op_type) == (CONTRIB, "GroupQueryAttention")


def _pairs(model: ir.Model) -> Iterator[tuple[ir.Value, ir.Value]]:
    outputs = {value.name: value for value in model.graph.outputs}
    for past in past_ports(model):
        name = present_name(past.name or "")
        if name not in outputs:
            raise LoweringError(f"the backbone gives no {name} for its input {past.name}")
        yield past, outputs[name]
