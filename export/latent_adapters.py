"""Multi-head latent attention: what is cached are expanded keys and values.

The models cache a latent per token and expand all of it at every step. Expanded once and cached,
attention is the one function again, at the cost of a larger cache: heads · (key size + value size)
numbers per token and layer instead of the latent's rank and one rotated part.
"""

from __future__ import annotations

from typing import Any

import torch

from headport.export.attention import MaskSpec, attend

__all__ = ["deepseek_v2_attention", "deepseek_v2_rotary", "expand_latents", "latent_sizes"]


def expand_latents(
    self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [B, H, T, D] and values [B, H, T, Dv] of latents [B, 1, T, R] and rotated parts.

    Joined instead of written into an empty tensor, which would become a scatter.
    """
    sizes = [self.qk_nope_head_dim, self.v_head_dim]
    expanded = self.kv_b_proj(kv_nope.squeeze(1)).unflatten(-1, (-1, sum(sizes))).transpose(1, 2)
    k_nope, value = expanded.split(sizes, dim=-1)
    key = torch.cat([k_nope, k_rot.expand(-1, k_nope.shape[1], -1, -1)], dim=-1)
    return key, value


def latent_sizes(self: Any) -> tuple[int, int, int]:
    """Heads, key size and value size of what is cached: expanded keys and values."""
    key_size = self.qk_nope_head_dim + self.qk_rope_head_dim
    return self.num_heads, key_size, self.v_head_dim


def deepseek_v2_rotary(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Cosines and sines [B, T, D / 2, 2] instead of complex numbers, which do not export."""
    inverse = self.inv_freq.to(device=x.device, dtype=torch.float32)
    angles = position_ids[..., None].float() * inverse
    factor: float = self.attention_scaling
    return torch.stack([angles.cos(), angles.sin()], dim=-1) * factor


def _rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    # x [B, H, T, D]; neighbours in D are the two parts of one complex number.
    real, imaginary = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = turns[:, None].unbind(-1)
    turned = [real * cos - imaginary * sin, real * sin + imaginary * cos]
    return torch.stack(turned, dim=-1).flatten(-2).type_as(x)


def deepseek_v2_attention(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: MaskSpec | None = None,
    cache: Any = None,
    position_embeddings: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """DeepSeek-V2's attention with real numbers for its rotary part."""
    assert position_embeddings is not None
    if self.q_lora_rank is None:
        query = self.q_proj(hidden_states)
    else:
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
    query = query.reshape(*query.shape[:2], -1, self.qk_head_dim).transpose(1, 2)
    sizes = [self.qk_nope_head_dim, self.qk_rope_head_dim]
    still, turning = query.split(sizes, dim=-1)
    compressed = self.kv_a_proj_with_mqa(hidden_states)
    latent, key_turning = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
    query = torch.cat([still, _rotate(turning, position_embeddings)], dim=-1)
    key_turned = _rotate(key_turning[:, None], position_embeddings)
    parts = cache.update(self.kv_a_layernorm(latent)[:, None], key_turned, self.layer_idx)
    key, value = self.expand_kv(*parts)
    y, _ = attend(
        self, query, key, value, attention_mask, scaling=self.scaling, is_causal=True, **kwargs
    )
    return self.o_proj(y.flatten(2)), None
