"""A model that is not transformers': a user's own `nn.Module`, described by a Python function.

`headport export package.module:function` calls the function, which returns an `OwnModel`. The
module's forward is `forward(input_ids, position_ids, context) -> logits`, and each of its attention
layers hands its queries, keys and values to `attend`, which keeps the cache. Everything else is the
module's own business. A wrapper lends it the few attributes that the exporter asks of any model.

Imports torch and transformers only, so that the validating process can use it too.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from headport.errors import CheckpointError

__all__ = ["Context", "OwnModel", "attend", "own_model"]


@dataclass(frozen=True)
class OwnModel:
    """A causal language model of the user's own, and what cannot be read off it."""

    module: torch.nn.Module  # forward(input_ids [B, T], position_ids [B, T], context) → [B, T, V]
    head: torch.nn.Module  # the part of it that runs last and has the matrix `weight` [V, H]
    embedding: torch.nn.Module  # the part of it whose `weight` [rows, …] is looked up by token id
    layers: int  # attention layers, numbered from 0
    max_context: int  # tokens
    tokenizer: Path  # folder with tokenizer.json and tokenizer_config.json, licence beside them
    windows: tuple[int, ...] = ()  # attention windows in use, so that parity crosses them
    generation: dict[str, Any] = field(default_factory=dict)  # such as {"eos_token_id": 0}

    def wrapped(self) -> torch.nn.Module:
        """The module with the attributes that the exporter asks of transformers' models."""
        # Messages and the manifest name a model by its class.
        kind = type(type(self.module).__name__, (_OwnCausalLM,), {})
        found: torch.nn.Module = kind(self)
        return found


@dataclass(frozen=True)
class Context:
    """What a forward pass carries from `forward` to `attend`; the module only hands it on."""

    cache: Any  # transformers' Cache, or None
    attention_mask: torch.Tensor | None  # [B, past + T], 1 where a slot holds a token
    config: Any
    module: torch.nn.Module


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: Context,
    layer: int,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal attention over the past and the new tokens, softmax(cap(scale * q k) + mask) v.

    Args:
        query: [B, heads, T, D], rotated already if positions are rotary.
        key: [B, key heads, T, D] of the new tokens; heads is a multiple of key heads.
        value: [B, key heads, T, Dv].
        context: As the module's forward was given it.
        layer: Number of this attention layer, from 0.
        scale: Of the products; by default 1 / sqrt(D).
        window: Tokens a query may see, itself included; 0 for all.
        softcap: c of c tanh(x / c) on the scaled products; 0 for none.

    Returns:
        [B, T, heads, Dv].
    """
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config, make = context.config, create_causal_mask
    if window:
        config = copy.copy(config)
        config.sliding_window = window
        make = create_sliding_window_causal_mask
    mask = make(config, query[:, 0], context.attention_mask, context.cache, layer_idx=layer)
    if context.cache is not None:
        key, value = context.cache.update(key, value, layer)
    function = ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation, _plain_attention)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    y, _ = function(context.module, query, key, value, mask, scaling=scale, softcap=softcap or None)
    found: torch.Tensor = y
    return found


def _plain_attention(  # noqa: PLR0917, the signature is transformers'
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, None]:
    # The definition, spelled out: this is what the exported operator is compared with.
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return (torch.softmax(scores + mask, -1) @ value).transpose(1, 2), None


class _OwnCausalLM(torch.nn.Module):
    def __init__(self, own: OwnModel) -> None:
        from transformers import GenerationConfig, PreTrainedConfig

        super().__init__()
        self.module = own.module
        self.windows = own.windows
        self._parts = (own.head, own.embedding)  # a tuple, so that they are not named twice
        weight: Any = own.head.weight
        rows, hidden_size = weight.shape
        self.config = PreTrainedConfig(
            architectures=[type(own.module).__name__],
            vocab_size=rows,
            hidden_size=hidden_size,
            num_hidden_layers=own.layers,
            max_position_embeddings=own.max_context,
            **own.generation,
        )
        self.config._attn_implementation = "eager"
        self.generation_config = GenerationConfig(**own.generation)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self._parts[0]

    def get_input_embeddings(self) -> torch.nn.Module:
        return self._parts[1]

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        use_cache: bool = False,
    ) -> Any:
        from transformers import DynamicCache

        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            batch, tokens = input_ids.shape
            position_ids = torch.arange(past, past + tokens).expand(batch, tokens)
        context = Context(cache, attention_mask, self.config, self.module)
        logits = self.module(input_ids, position_ids, context)
        return SimpleNamespace(logits=logits, cache=cache)


@cache
def own_model(factory: str) -> OwnModel:
    """Call `module:function`; the folder one is in counts as a place to import from.

    Raises:
        CheckpointError: If it cannot be imported or called, or does not return an `OwnModel` whose
            parts fit together.
    """
    module_name, _, function_name = factory.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(module_name), function_name)()
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise CheckpointError(
            f"{factory}: the function cannot be called: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, OwnModel):
        raise CheckpointError(
            f"{factory}: headport.export.OwnModel was expected, it returned {type(made).__name__}"
        )
    faults = list(_faults(made))
    if faults:
        raise CheckpointError(f"{factory}: {'; '.join(faults)}")
    return made


def _faults(own: OwnModel) -> list[str]:
    faults: list[str] = []
    inside = {id(part) for part in own.module.modules()}
    for name in ("head", "embedding"):
        part = getattr(own, name)
        weight = getattr(part, "weight", None)
        if id(part) not in inside:
            faults.append(f"{name} is not a part of module")
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            faults.append(f"{name} has no matrix `weight`")
    taken = list(inspect.signature(own.module.forward).parameters)
    if len(taken) != 3:
        faults.append(
            f"forward(input_ids, position_ids, context) was expected, it takes {', '.join(taken)}"
        )
    if own.layers < 1 or own.max_context < 1:
        faults.append("layers and max_context must be at least 1")
    tokenizer: Any = own.tokenizer  # a user's function may give anything
    if not isinstance(tokenizer, Path):
        faults.append(f"tokenizer must be a pathlib.Path, not {type(tokenizer).__name__}")
    elif not (tokenizer / "tokenizer.json").is_file():
        faults.append(f"no tokenizer.json in {tokenizer}")
    return faults
