"""RecurrentGemma, whose layers keep their states in their modules instead of a cache.

The block's convolution and the unit's recurrence become the operators that other families reach
through transformers' functions; gates and projections stay the modules' own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from headport.export.attention import traced_cache
from headport.export.recurrent import convolve, emit_scan
from headport.export.recurrent_cache import RecurrentCache
from headport.export.scan_functions import LINEAR_SCAN
from headport.export.states import StateShape

__all__ = ["module_states", "states_in_modules"]

_BLOCK = "transformers.models.recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock"


def _blocks(model: Any) -> dict[int, Any]:
    # Layer → its recurrent block; other layers have an attention block there.
    found = {}
    for index, layer in enumerate(getattr(getattr(model, "model", None), "layers", ())):
        block = getattr(layer, "temporal_block", None)
        if f"{type(block).__module__}.{type(block).__qualname__}" == _BLOCK:
            found[index] = block
    return found


def module_states(model: Any) -> dict[int, tuple[StateShape, ...]]:
    """The states that modules keep in themselves, by layer."""
    return {
        index: (
            StateShape(index, "conv", (block.lru_width, block.conv1d_width - 1)),
            StateShape(index, "recurrent", (block.lru_width,)),
        )
        for index, block in _blocks(model).items()
    }


@contextmanager
def states_in_modules(model: Any) -> Iterator[None]:
    """Replace what keeps such states, on this model only, while the context lasts."""
    blocks = _blocks(model)
    try:
        for index, block in blocks.items():
            block.layer_of_states = index
            block.forward = MethodType(_block, block)
            block.rg_lru._rnn_scan = MethodType(_recurrence, block.rg_lru)
        yield
    finally:
        for block in blocks.values():
            block.__dict__.pop("forward", None)
            block.rg_lru.__dict__.pop("_rnn_scan", None)
            block.__dict__.pop("layer_of_states", None)


def _cache() -> RecurrentCache:
    cache = traced_cache()
    assert isinstance(cache, RecurrentCache)
    return cache


def _block(
    self: Any, input_states: torch.Tensor, position_ids: torch.Tensor, *_args: Any, **_kwargs: Any
) -> tuple[torch.Tensor, None]:
    # input_states [B, T, H]
    x = self.linear_x(input_states).transpose(1, 2)
    cache = _cache()
    cache.update_conv_state(x, self.layer_of_states)
    x = convolve(cache, x, self.conv_1d.weight.squeeze(1), self.conv_1d.bias)
    y = self.rg_lru(x.transpose(1, 2), position_ids)
    return self.linear_out(y * self.act_fn(self.linear_y(input_states))), None


def _recurrence(
    self: Any,  # noqa: ARG001
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    # hidden_states, recurrent_gate [B, T, D]; reset [B, T, 1] is True at a row's first token
    y, _ = emit_scan(
        _cache(), LINEAR_SCAN, (hidden_states, recurrent_gate * ~reset), hidden_states.shape
    )
    return y.to(hidden_states.dtype), None
