"""Truth values that are counted as float32 instead of int32.

    Cast<int32>(flags) → Pad → ArgMax or Cast<bool>   →   Cast<float>(flags) → Pad → …

ONNX Runtime's CUDA provider has no Pad and no ArgMax for int32; 0 and 1 are the same in both types.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from headport.lowering.emit import Emitter, attribute
from headport.lowering.match import Match
from headport.manifest import Head

__all__ = ["count_flags_as_floats"]

_READERS = ("ArgMax", "Cast")


def count_flags_as_floats(model: ir.Model, head: Head, name: str) -> list[Match]:
    """Retype the flags of a head that gives candidates."""
    del head
    matches = []
    for pad in [node for node in model.graph if node.op_type == "Pad"]:
        flags = pad.inputs[0].producer() if pad.inputs[0] else None
        if not _counts_flags(pad, flags):
            continue
        assert flags is not None and pad.inputs[2] is not None
        filler = pad.inputs[2].const_value
        assert filler is not None
        emit = Emitter(model.graph, flags, "head")
        flags.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
        pad.replace_input_with(2, emit.scalar(float(filler.numpy()), np.float32))
        for value in (flags.outputs[0], pad.outputs[0]):
            value.type = ir.TensorType(ir.DataType.FLOAT)
        matches.append(Match(f"head {name}", "int32 flags", "float32 flags"))
    return matches


def _counts_flags(pad: ir.Node, flags: ir.Node | None) -> bool:
    return (
        flags is not None
        and flags.op_type == "Cast"
        and attribute(flags, "to", None) == ir.DataType.INT32
        and len(flags.outputs[0].uses()) == 1
        and len(pad.inputs) > 2
        and pad.inputs[2] is not None
        and pad.inputs[2].const_value is not None
        and all(use.node.op_type in _READERS for use in pad.outputs[0].uses())
    )
