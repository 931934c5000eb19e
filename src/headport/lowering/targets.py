"""The targets a bundle can be lowered to: for each, the passes of its backbone and heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from headport.cache_ports import cache_slots
from headport.errors import LoweringError, UsageError
from headport.lowering.attention import (
    CPU_KERNEL,
    CPU_KERNEL_1_30,
    CUDA_KERNEL,
    AttentionKernel,
    attention_calls,
    lower_attention,
)
from headport.lowering.experts import EXPERTS, lower_experts
from headport.lowering.flags import count_flags_as_floats
from headport.lowering.head import lower_head, lower_head_unrounded
from headport.lowering.in_place import (
    RECURRENCES,
    UNIFORM_STEP,
    add_step_inputs,
    drop_growing_inputs,
)
from headport.lowering.layouts import straighten
from headport.lowering.match import Match
from headport.lowering.own_attention import adopt_attention
from headport.lowering.own_candidates import adopt_candidates
from headport.lowering.own_fusion import fuse_gates, fuse_norms
from headport.lowering.own_kernels import adopt_in_head, adopt_kernels
from headport.lowering.packed_qkv import pack_qkv
from headport.lowering.positions import lower_positions
from headport.lowering.reshapes import fix_reshapes
from headport.lowering.rotary import rotate_inside
from headport.lowering.siblings import pack_siblings
from headport.lowering.skip_norms import fuse_skip_norms
from headport.lowering.states import lower_states
from headport.lowering.tensorrt import attention as tensorrt_attention
from headport.lowering.tensorrt import head as tensorrt_head
from headport.manifest import Head

__all__ = ["NEWEST", "TARGETS", "Sized", "Target", "find_target"]


# Its own passes say what they replace; of this only that no cache is changed in place.
TENSORRT_KERNEL = AttentionKernel(
    "TensorRT", (ir.DataType.FLOAT, ir.DataType.FLOAT16), query_seqlens=True, bias_with_sinks=True
)

BackbonePass = Callable[[ir.Model], list[Match]]
HeadPass = Callable[[ir.Model, Head, str], list[Match]]


@dataclass(frozen=True)
class Sized:
    """A pass that needs to know how many slots a cache may have."""

    rewrite: Callable[[ir.Model, int], list[Match]]

    def __call__(self, model: ir.Model, slots: int) -> list[Match]:
        return self.rewrite(model, slots)


@dataclass(frozen=True)
class Target:
    """Passes in the order they run; each changes the model and says what it found."""

    name: Literal["ort-cpu", "ort-cuda", "tensorrt"]
    kernel: AttentionKernel
    backbone: tuple[BackbonePass | Sized, ...]
    head: tuple[HeadPass, ...]
    packing: tuple[BackbonePass, ...] = ()  # last of all, when every product has its kernel
    growing: tuple[BackbonePass, ...] = ()  # in place of `backbone` where caches go on growing
    activations: str | None = None  # what an INT8 head does to them; None: as it was quantised
    unproved: str | None = None  # what runs it in the end and cannot be tried when it is lowered

    def passes(self, backbone: ir.Model, max_context: int) -> tuple[BackbonePass, ...]:
        """The passes of this backbone, but for packing."""
        if _stays_growing(backbone, self.kernel):
            return self.growing
        slots = cache_slots(max_context)
        return tuple(
            partial(each, slots=slots) if isinstance(each, Sized) else each
            for each in self.backbone
        )


def _stays_growing(model: ir.Model, kernel: AttentionKernel) -> bool:
    types = {call.inputs[3].dtype for call in attention_calls(model) if call.inputs[3]}
    return bool(types) and types <= set(kernel.growing_dtypes)


def _keep_attention(model: ir.Model) -> list[Match]:
    reason = f"no {CUDA_KERNEL.provider} kernel computes it in this type; its caches grow"
    return [
        Match(f"attention layer {index}", call.op_type, None, reason)
        for index, call in enumerate(attention_calls(model))
    ]


_PORTABLE_ON_CUDA = "run the portable bundle with --provider cuda --cpu-fallback instead"


def _refuse_unproved(
    model: ir.Model, where: str = "CUDA", instead: str = _PORTABLE_ON_CUDA
) -> list[Match]:
    """Refuse what no kernel of the target is known to compute."""
    found = sorted(
        {
            n.op_type
            for n in model.graph
            if n.domain == "headport" and n.op_type.startswith((*RECURRENCES, EXPERTS))
        }
    )
    if found:
        raise LoweringError(
            f"the backbone calls {', '.join(found)}, which have no proved form on {where}; "
            f"{instead}"
        )
    return []


def _remove_unused(model: ir.Model) -> list[Match]:
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    common_passes.RemoveUnusedOpsetsPass()(model)
    return []


TARGETS = {
    "ort-cpu": Target(
        name="ort-cpu",
        kernel=CPU_KERNEL,
        backbone=(
            add_step_inputs,
            lower_positions,
            lower_states,
            lower_attention,
            Sized(rotate_inside),
            straighten,
            fuse_skip_norms,
            lower_experts,
            _remove_unused,
            drop_growing_inputs,
        ),
        packing=(pack_siblings, pack_qkv, _remove_unused),
        head=(lower_head,),
    ),
    "ort-cuda": Target(
        name="ort-cuda",
        kernel=CUDA_KERNEL,
        backbone=(
            _refuse_unproved,
            partial(add_step_inputs, inputs=UNIFORM_STEP),
            lower_positions,
            partial(lower_attention, kernel=CUDA_KERNEL),
            fix_reshapes,
            straighten,
            fuse_skip_norms,
            _remove_unused,
            drop_growing_inputs,
        ),
        packing=(pack_siblings, pack_qkv, _remove_unused),
        growing=(_refuse_unproved, _keep_attention, fix_reshapes, _remove_unused),
        head=(lower_head_unrounded, count_flags_as_floats),
        activations="exact",
    ),
    # Caches go in and come out, and grow, as in the portable form.
    "tensorrt": Target(
        name="tensorrt",
        kernel=TENSORRT_KERNEL,
        backbone=(
            partial(_refuse_unproved, where="TensorRT"),
            tensorrt_attention.lower_attention,
            tensorrt_attention.write_out_functions,
        ),
        head=(tensorrt_head.lower_head,),
        activations="exact",
        unproved="TensorRT",
    ),
}

NEWEST = "1.32"  # ONNX Runtime that TARGETS are written for

# Targets for an older ONNX Runtime than that, by the oldest one that loads what they write.
_OLDER = {
    ("ort-cpu", "1.30"): Target(
        name="ort-cpu",
        kernel=CPU_KERNEL_1_30,
        backbone=(
            partial(
                _refuse_unproved,
                where="ONNX Runtime 1.30",
                instead=f"lower it for {NEWEST}",
            ),
            partial(add_step_inputs, inputs=UNIFORM_STEP),
            lower_positions,
            partial(lower_attention, kernel=CPU_KERNEL_1_30),
            straighten,
            fuse_skip_norms,
            _remove_unused,
            drop_growing_inputs,
        ),
        packing=(pack_siblings, pack_qkv, _remove_unused),
        head=(lower_head,),
        unproved="ONNX Runtime 1.30",
    ),
}


def find_target(name: str, onnxruntime: str = NEWEST, *, own_kernels: bool = False) -> Target:
    """The target of this name whose graphs an ONNX Runtime of at least this release loads.

    Args:
        name: Key of `TARGETS`.
        onnxruntime: The oldest release.
        own_kernels: Whether products take headport's own kernel.

    Raises:
        UsageError: If there is none.
    """
    found = _find_target(name, onnxruntime)
    if not own_kernels:
        return found
    if name != "ort-cpu":
        raise UsageError(f"--kernels are for --target ort-cpu, {name} was given")
    return replace(
        found,
        backbone=(*found.backbone, adopt_attention),
        packing=(adopt_kernels, *found.packing, fuse_gates, fuse_norms),
        head=(*found.head, adopt_in_head, adopt_candidates),
    )


def _find_target(name: str, onnxruntime: str) -> Target:
    if name not in TARGETS:
        raise UsageError(f"--target {name}: use one of {', '.join(TARGETS)}")
    if onnxruntime == NEWEST:
        return TARGETS[name]
    if (name, onnxruntime) not in _OLDER:
        known = ", ".join(f"{release} for {target}" for target, release in _OLDER)
        raise UsageError(
            f"--onnxruntime-at-least {onnxruntime}: {NEWEST} was expected, or {known}; "
            f"--target {name} was given"
        )
    return _OLDER[name, onnxruntime]
