"""Replacement forwards of experts and routers that transformers' interface does not reach."""

from __future__ import annotations

from typing import Any

import torch
from transformers.activations import SiLUActivation

from headport.errors import ExportError
from headport.export.expert_function import ExpertLayout
from headport.export.experts import Expert, emit_experts

__all__ = ["dbrx_experts", "phimoe_router"]


def dbrx_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """DBRX: the matrices of all experts lie in one, rows before columns in the last one too."""
    mlp = self.mlp
    shape = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    gate, up, down = (w.view(shape).transpose(1, 2) for w in (mlp.w1, mlp.v1, mlp.w2))
    if not isinstance(mlp.activation_fn, SiLUActivation):
        raise ExportError(
            f"{type(self).__name__}: silu was expected as its experts' activation, "
            f"{type(mlp.activation_fn).__name__} found; this model is refused"
        )
    layout = ExpertLayout("swiglu", transposed=True)
    weights = [torch.cat([gate, up], dim=2), down.transpose(1, 2)]
    y = emit_experts(
        Expert(layout), hidden_states.flatten(0, 1), top_k_index, top_k_weights, weights
    )
    return y.view(hidden_states.shape)


def phimoe_router(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Phi-MoE's sparse mixer in evaluation: two best experts, each weighed among those near it.

    Experts count as near whose score is within 2 · jitter of the best, relative to the larger of
    both magnitudes. The module switches gradients off halfway, which does not trace.

    Source: Liu et al. 2024, arXiv:2409.12136.
    """
    scores = torch.nn.functional.linear(hidden_states, self.weight)
    lowest = torch.finfo(scores.dtype).min
    gates, weights, experts = scores, [], []
    for _ in range(2):
        best, expert = gates.max(dim=-1, keepdim=True)
        near = (best - scores) / scores.abs().clamp(min=best) <= 2 * self.router_jitter_noise
        shares = torch.softmax(gates.masked_fill(~near, lowest), dim=-1)
        weights.append(shares.gather(-1, expert))
        experts.append(expert)
        gates = gates.scatter(-1, expert, lowest)
    return scores, torch.cat(weights, dim=-1), torch.cat(experts, dim=-1)
