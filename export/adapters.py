"""Models that bypass transformers' attention interface or its cache, one row each.

A row names a module and the short forward that replaces its own while the model is traced. Nothing
here computes anything new: a replacement splits heads as the module does and hands them to the one
attention function. The untouched module stays the reference.
"""
# ruff: noqa: PLR0917  replacements take what the module's own forward takes

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from headport.errors import ExportError
from headport.export.attention import MaskSpec, attend, traced_cache
from headport.export.expert_adapters import dbrx_experts, phimoe_router
from headport.export.latent_adapters import (
    deepseek_v2_attention,
    deepseek_v2_rotary,
    expand_latents,
    latent_sizes,
)

__all__ = [
    "ADAPTERS",
    "REFUSED",
    "Adapter",
    "adapted",
    "cached_sizes",
    "check_family",
    "expanded_layers",
    "halving_slopes",
    "mpt_slopes",
]

_Sizes = tuple[int, int, int]  # heads, key size, value size


@dataclass(frozen=True)
class Adapter:
    """How modules of one class are traced."""

    forward: Callable[..., Any]
    method: str = "forward"  # which of its methods is replaced
    sizes: Callable[[Any], _Sizes] | None = None  # of its cache, where it differs from the model's


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    # [B, T, heads · D] → [B, heads, T, D]
    return x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2)


def halving_slopes(heads: int) -> torch.Tensor:
    """ALiBi slopes of a number of heads, [heads] float32.

    2 ** (-8 i / n) for i = 1 … n; where heads is no power of two, the odd ones of twice as many
    fill up. Source: Press et al. 2022, arXiv:2108.12409, and the authors' code.
    """
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * i / whole) for i in range(1, whole + 1)]
    slopes += [2.0 ** (-4 * i / whole) for i in range(1, 2 * whole, 2)]
    return torch.tensor(slopes[:heads], dtype=torch.float32)


def mpt_slopes(heads: int) -> torch.Tensor:
    """ALiBi slopes as MPT orders them, [heads] float32.

    The number of heads is rounded up to a power of two, and every other slope comes first. The
    largest is 2 ** -(8 / n): the model does not let its config change the 8.
    """
    whole = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-8 * i / whole) for i in range(1, whole + 1)]
    if whole != heads:
        slopes = slopes[1::2] + slopes[::2]
    return torch.tensor(slopes[:heads], dtype=torch.float32)


def _bloom(
    self: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,  # noqa: ARG001
    attention_mask: MaskSpec,
    layer_past: Any = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    key, value = layer_past.update(key, value, self.layer_idx)
    slopes = halving_slopes(self.num_heads)
    y, _ = attend(
        self, query, key, value, attention_mask, scaling=self.inv_norm_factor, slopes=slopes
    )
    return self.dense(y.flatten(2)) + residual, None


def _mpt(
    self: Any,
    hidden_states: torch.Tensor,
    position_bias: torch.Tensor,  # noqa: ARG001
    cache: Any = None,
    attention_mask: MaskSpec | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    fused = self.Wqkv(hidden_states)
    if self.clip_qkv:
        fused = fused.clamp(-self.clip_qkv, self.clip_qkv)
    query, key, value = (_heads(x, self.n_heads) for x in fused.chunk(3, dim=2))
    key, value = cache.update(key, value, self.layer_idx)
    slopes = mpt_slopes(self.n_heads)
    y, _ = attend(
        self, query, key, value, attention_mask, scaling=self.softmax_scale, slopes=slopes
    )
    return self.out_proj(y.flatten(2)), None


def _falcon(
    self: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: MaskSpec,
    position_ids: torch.Tensor | None = None,  # noqa: ARG001
    layer_past: Any = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    fused = self.query_key_value(hidden_states)
    if self.new_decoder_architecture:
        # Each group of queries with its one key and value; the model repeats those, we need not.
        grouped = fused.unflatten(-1, (self.num_kv_heads, -1, self.head_dim))
        query = grouped[..., :-2, :].flatten(2, 3)
        key, value = grouped[..., -2, :], grouped[..., -1, :]
    else:
        query, key, value = self._split_heads(fused)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    slopes = None
    if alibi is None:
        assert position_embeddings is not None
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        slopes = halving_slopes(self.num_heads).bfloat16().float()
    key, value = layer_past.update(key, value, self.layer_idx)
    scaling = self.inv_norm_factor
    y, _ = attend(
        *(self, query, key, value, attention_mask),
        scaling=scaling,
        slopes=slopes,
        rounded_slopes=True,
    )
    return self.dense(y.flatten(2)), None


def _falcon_sizes(self: Any) -> _Sizes:
    return self.num_kv_heads, self.head_dim, self.head_dim


def _gpt_neo(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: MaskSpec | None = None,
    layer_past: Any = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = (
        _heads(project(hidden_states), self.num_heads)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    key, value = layer_past.update(key, value, self.layer_id)
    if self.attention_type == "local":
        attention_mask = MaskSpec(self.config.window_size)
    y, _ = attend(self, query, key, value, attention_mask, scaling=1.0)
    return self.out_proj(y.flatten(2)), None


def _gpt_neox_japanese(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: MaskSpec,
    position_ids: torch.Tensor,  # noqa: ARG001
    layer_past: Any = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None, Any]:
    from transformers.models.gpt_neox_japanese import modeling_gpt_neox_japanese as own

    assert position_embeddings is not None
    fused = _heads(self.query_key_value(hidden_states), self.num_attention_heads)
    query, key, value = fused.chunk(3, dim=-1)
    turning, still = zip(
        *(x.tensor_split((self.rotary_ndims,), dim=-1) for x in (query, key)), strict=True
    )
    turned = own.apply_rotary_pos_emb(*turning, *position_embeddings)
    query, key = (torch.cat(pair, dim=-1) for pair in zip(turned, still, strict=True))
    key, value = layer_past.update(key, value, self.layer_idx)
    y, _ = attend(self, query, key, value, attention_mask, scaling=1.0 / self.norm_factor)
    return self.dense(y.flatten(2)), None, self.dense_bias


def _xglm(
    self: Any,
    hidden_states: torch.Tensor,
    cache: Any = None,
    attention_mask: MaskSpec | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = (
        _heads(project(hidden_states), self.num_heads)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    key, value = cache.update(key, value, self.layer_idx)
    y, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling)
    return self.out_proj(y.flatten(2)), None


def _sinusoids(self: Any, position_ids: torch.Tensor, *_args: Any) -> torch.Tensor:
    # The module makes its table longer when it is too short, which a graph cannot. The table is
    # computed in float32 also where the model is half precision.
    table: torch.Tensor = self.weights
    kind = next(iter(traced_cache().past_keys.values())).dtype
    return table[position_ids + self.offset].to(kind)


def _openai_gpt(self: Any, x: torch.Tensor, *_args: Any, **_kwargs: Any) -> list[torch.Tensor]:
    query, key, value = (
        _heads(part, self.n_head) for part in self.c_attn(x).split(self.split_size, dim=2)
    )
    key, value = traced_cache().update(key, value, self.layer_idx)
    scaling = value.shape[-1] ** -0.5 if self.scale else 1.0
    y, _ = attend(self, query, key, value, MaskSpec(0), scaling=scaling)
    return [self.c_proj(y.flatten(2))]


def _openai_gpt_sizes(self: Any) -> _Sizes:
    size = self.split_size // self.n_head
    return self.n_head, size, size


_MODELS = "transformers.models"
# Module class, by where it is defined.
ADAPTERS: dict[str, Adapter] = {
    f"{_MODELS}.{name}": adapter
    for name, adapter in {
        "bloom.modeling_bloom.BloomAttention": Adapter(_bloom),
        "mpt.modeling_mpt.MptAttention": Adapter(_mpt),
        "falcon.modeling_falcon.FalconAttention": Adapter(_falcon, sizes=_falcon_sizes),
        "gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": Adapter(_gpt_neo),
        "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": Adapter(
            _gpt_neox_japanese
        ),
        "xglm.modeling_xglm.XGLMAttention": Adapter(_xglm),
        "xglm.modeling_xglm.XGLMSinusoidalPositionalEmbedding": Adapter(_sinusoids),
        "openai.modeling_openai.Attention": Adapter(_openai_gpt, sizes=_openai_gpt_sizes),
        "deepseek_v2.modeling_deepseek_v2.DeepseekV2RotaryEmbedding": Adapter(deepseek_v2_rotary),
        "deepseek_v2.modeling_deepseek_v2.DeepseekV2Attention": Adapter(deepseek_v2_attention),
        "dbrx.modeling_dbrx.DbrxExperts": Adapter(dbrx_experts),
        "phimoe.modeling_phimoe.PhimoeTopKRouter": Adapter(phimoe_router),
    }.items()
}
# Multi-head latent attention is many classes of one shape.
_LATENT = Adapter(expand_latents, method="expand_kv", sizes=latent_sizes)

# Causal-LM class → why it is refused.
REFUSED: dict[str, str] = {
    "XLNetLMHeadModel": "its attention is relative, in two streams, and looks both ways",
    "XLMWithLMHeadModel": "it reads text both ways and makes its masks itself",
    "ReformerModelWithLMHead": "it attends by hashing over buckets and has a cache of its own",
    "ProphetNetForCausalLM": "it predicts several tokens ahead in streams of its own",
    "RwkvForCausalLM": "it keeps its states in lists of its own, and no function computes them",
    "xLSTMForCausalLM": "it keeps its states in a cache of its own, scaled by a running maximum",
    "DogeForCausalLM": "its attention masks are made from the values it attends to",
    "DiffLlamaForCausalLM": "its attention is the difference of two, over values joined in pairs",
    "JetMoeForCausalLM": "its experts lie inside attention, which repeats keys for them",
    "CpmAntForCausalLM": "its attention adds relative buckets and looks both ways in a prompt",
}


def check_family(model: Any) -> None:
    """Refuse families that are known not to be causal language models with a KV cache.

    Raises:
        ExportError: Naming the family and the reason.
    """
    name = type(model).__name__
    if name in REFUSED:
        raise ExportError(
            f"{name} is refused: {REFUSED[name]}; export a decoder-only model, or wrap this one "
            "in a module of your own"
        )


def _rows(model: Any) -> list[tuple[Any, Adapter]]:
    found = []
    for module in model.modules():
        if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj"):
            found.append((module, _LATENT))
        row = ADAPTERS.get(f"{type(module).__module__}.{type(module).__qualname__}")
        if row is not None:
            found.append((module, row))
    return found


def cached_sizes(model: Any) -> dict[int, _Sizes]:
    """Layers whose keys and values are cached in another size than the model's own cache has.

    Returns:
        Layer index → heads, key size, value size.
    """
    own = [(m, row.sizes) for m, row in _rows(model) if row.sizes is not None]
    return {getattr(m, "layer_idx", i): sizes(m) for i, (m, sizes) in enumerate(own)}


def expanded_layers(model: Any) -> frozenset[int]:
    """Layers that cache latents, which are expanded before attention."""
    return frozenset(m.layer_idx for m, row in _rows(model) if row is _LATENT)


@contextmanager
def adapted(model: Any) -> Iterator[None]:
    """Replace what the table names, on this model only, while the context lasts."""
    rows = _rows(model)
    numbered = [m for m, row in rows if row.sizes is not None and not hasattr(m, "layer_idx")]
    try:
        for i, module in enumerate(numbered):
            module.layer_idx = i
        for module, row in rows:
            setattr(module, row.method, MethodType(row.forward, module))
        yield
    finally:
        for module, row in rows:
            module.__dict__.pop(row.method, None)
        for module in numbered:
            del module.layer_idx
