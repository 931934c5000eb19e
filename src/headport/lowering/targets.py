"""The targets a bundle can be lowered to: for each, the passes of its backbone and heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from headport.lowering.attention import lower_attention
from headport.lowering.experts import lower_experts
from headport.lowering.head import lower_head
from headport.lowering.in_place import add_step_inputs, drop_growing_inputs
from headport.lowering.match import Match
from headport.lowering.positions import lower_positions
from headport.lowering.states import lower_states
from headport.manifest import Head

__all__ = ["TARGETS", "Target"]


@dataclass(frozen=True)
class Target:
    """Passes in the order they run; each changes the model and says what it found."""

    name: Literal["ort-cpu"]
    backbone: tuple[Callable[[ir.Model], list[Match]], ...]
    head: tuple[Callable[[ir.Model, Head, str], list[Match]], ...]


def _remove_unused(model: ir.Model) -> list[Match]:
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    common_passes.RemoveUnusedOpsetsPass()(model)
    return []


TARGETS = {
    "ort-cpu": Target(
        name="ort-cpu",
        backbone=(
            add_step_inputs,
            lower_positions,
            lower_states,
            lower_attention,
            lower_experts,
            _remove_unused,
            drop_growing_inputs,
        ),
        head=(lower_head,),
    ),
}
