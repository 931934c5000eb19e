"""Routed experts of a layer as one operator, a call of `MixtureOfExperts…`.

transformers lets a caller register an implementation of experts, as it does for attention. What
an expert computes between its two matrices is measured, not read off a class: its gate takes no
weights, so it is fed chosen values, fitted, and checked on others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface

from headport.errors import ExportError
from headport.export.expert_function import ExpertLayout
from headport.export.functions import DOMAIN

__all__ = ["Expert", "emit_experts", "measure_expert", "one_op_per_layer"]

_IMPLEMENTATION = "headport"
_TOLERANCE = 2e-6  # of the largest value; float32 elementwise functions stay below
_FAR = 1e6  # a gate that answers this far out has no limit
_SIZE, _ROWS = 16, 64


@dataclass(frozen=True)
class Expert:
    """What lies between an expert's matrices; alpha, beta and limit belong to swiglu."""

    layout: ExpertLayout
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = 0.0  # 0 for none

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        """Apply it to what the first matrix gives, [N, 2 I or I]; returns [N, I]."""
        if not self.layout.gated:
            return _PLAIN[self.layout.activation](h)
        gate, up = (h[..., ::2], h[..., 1::2]) if self.layout.interleaved else h.chunk(2, dim=-1)
        if self.layout.clamped:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.layout.activation == "swiglu":
            return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)
        return _PLAIN[self.layout.activation](gate) * up


_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelutanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "relu2": lambda x: torch.nn.functional.relu(x).square(),
}

_experts: ContextVar[dict[int, Expert] | None] = ContextVar("experts", default=None)


@contextmanager
def one_op_per_layer(model: Any) -> Iterator[None]:
    """Route all experts of a model through `MixtureOfExperts…` while the context lasts.

    Raises:
        ExportError: If experts compute something that the operator cannot express.
    """
    modules = [m for m in model.modules() if hasattr(m, "is_concatenated")]
    measured = {id(m): _measure_module(m) for m in modules}
    ExpertsInterface.register(_IMPLEMENTATION, _emit_module)
    configs = {id(m.config): m.config for m in modules}
    found = [(c, c._experts_implementation) for c in configs.values()]
    token = _experts.set(measured)
    try:
        for config, _ in found:
            config._experts_implementation = _IMPLEMENTATION
        yield
    finally:
        for config, implementation in found:
            config._experts_implementation = implementation
        _experts.reset(token)


def _measure_module(module: Any) -> Expert:
    kind = type(module).__name__
    if module.has_post_expert_norm:
        raise ExportError(
            f"{kind}: each expert has a norm of its own behind it, which the exported experts "
            "cannot express; this family is refused"
        )
    inner = module._apply_gate if module.has_gate else module.act_fn
    expert = measure_expert(inner, gated=module.has_gate, name=kind)
    layout = replace(expert.layout, transposed=module.is_transposed, bias=module.has_bias)
    return replace(expert, layout=layout)


@torch.no_grad()
def measure_expert(
    inner: Callable[[torch.Tensor], torch.Tensor], *, gated: bool, name: str
) -> Expert:
    """Find what an expert computes between its matrices.

    Args:
        inner: [N, 2 I or I] → [N, I], float32.
        gated: Whether the first matrix gives gates besides values.
        name: Names the module in messages.

    Raises:
        ExportError: If no activation known here explains what it answers.
    """
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn((_ROWS, _SIZE), generator=generator)
    probe = torch.cat([probe, 4 * probe, 40 * probe])
    expected = inner(probe)
    limit = _TOLERANCE * max(1.0, expected.abs().max().item())
    for candidate in _candidates(inner, gated):
        if (candidate(probe) - expected).abs().max().item() <= limit:
            return candidate
    raise ExportError(
        f"{name}: what its experts compute between their matrices is none of the activations "
        f"that can be exported ({', '.join(_PLAIN)}, plain or gated); this family is refused"
    )


def _candidates(inner: Callable[[torch.Tensor], torch.Tensor], gated: bool) -> Iterator[Expert]:
    if not gated:
        # silu is a swiglu without a gate.
        yield from (Expert(ExpertLayout(name, gated=False)) for name in _PLAIN)
        return
    for interleaved in (False, True):
        yield from _swiglu(inner, interleaved)
        for name in _PLAIN:
            yield Expert(ExpertLayout(name, interleaved=interleaved))


def _swiglu(inner: Callable[[torch.Tensor], torch.Tensor], interleaved: bool) -> Iterator[Expert]:
    # With g = 1 inside the limit, f(1, u) = s (u + beta), s = sigmoid(alpha); far out u is limit.
    def at(gate: float, up: float) -> float:
        pair = torch.tensor([gate, up], dtype=torch.float32)
        h = pair.repeat(_SIZE // 2) if interleaved else pair.repeat_interleave(_SIZE // 2)
        return inner(h[None])[0, 0].item()

    step = at(1.0, 0.5) - at(1.0, 0.0)
    s = 2 * step
    if not 0.0 < s < 1.0:
        return
    alpha = _short(float(torch.logit(torch.tensor(s, dtype=torch.float64))))
    beta = _short(at(1.0, 0.0) / s)
    reach = at(1.0, _FAR) / s - beta
    limited = reach < 0.5 * _FAR
    layout = ExpertLayout("swiglu", clamped=limited, interleaved=interleaved)
    yield Expert(layout, alpha, beta, _short(reach) if limited else 0.0)


def _short(value: float) -> float:
    # Configurations hold short decimals; float32 knows no more than six or seven digits.
    short = float(f"{value:.4g}")
    return short if abs(short - value) <= 2e-5 * max(1.0, abs(value)) else value


def _emit_module(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    known = _experts.get()
    if known is None or id(module) not in known:
        raise ExportError(f"{type(module).__name__}: experts outside the model that is exported")
    first = "gate_up_proj" if module.has_gate else "up_proj"
    weights = [getattr(module, first), module.down_proj]
    if module.has_bias:
        weights += [getattr(module, f"{first}_bias"), module.down_proj_bias]
    return emit_experts(known[id(module)], hidden_states, top_k_index, top_k_weights, weights)


def emit_experts(
    expert: Expert,
    hidden_states: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    weights: list[torch.Tensor],
) -> torch.Tensor:
    """Emit the operator in a trace.

    Args:
        expert: What one expert computes.
        hidden_states: [N, H].
        expert_ids: [N, k], integers, all different in a row.
        expert_weights: [N, k].
        weights: up [E, …], down [E, …] and, if the layout has biases, up_bias, down_bias.

    Returns:
        [N, H].
    """
    if hidden_states.dim() != 2 or expert_ids.shape != expert_weights.shape:
        raise ExportError(
            f"experts were expected to take hidden states [N, H] and k choices per row, found "
            f"{tuple(hidden_states.shape)}, {tuple(expert_ids.shape)} and "
            f"{tuple(expert_weights.shape)}"
        )
    y: torch.Tensor = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{expert.layout.name}",
        (hidden_states, expert_ids.to(torch.int64), expert_weights, *weights),
        attrs={"alpha": expert.alpha, "beta": expert.beta, "limit": expert.limit},
        dtype=hidden_states.dtype,
        shape=hidden_states.shape,
        version=1,
    )
    return y
