"""The cache of a traced recurrent model: keys and values, and states beside them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from headport.errors import ExportError
from headport.export.attention import TracedCache
from headport.export.functions import DOMAIN
from headport.export.recurrent_functions import NEW_TOKENS
from headport.export.states import StateKind, StateShape

__all__ = ["RecurrentCache"]


class RecurrentCache(TracedCache):
    """A cache that also holds states: pasts are graph inputs, presents the operators' outputs.

    Args:
        past_keys: As `TracedCache`.
        past_values: As `TracedCache`.
        attention_mask: [B, P + T] int64.
        layers: Layer of the model of each of the keys.
        states: The states' shapes.
        past_states: Per state, [B, *dims].
        input_ids: [B, T] int64, the tokens of this step.
    """

    def __init__(
        self,
        past_keys: Sequence[torch.Tensor],
        past_values: Sequence[torch.Tensor],
        attention_mask: torch.Tensor,
        *,
        layers: Sequence[int],
        states: Sequence[StateShape],
        past_states: Sequence[torch.Tensor],
        input_ids: torch.Tensor,
    ) -> None:
        super().__init__(past_keys, past_values, attention_mask, layers)
        self.states = {(s.kind, s.layer): s for s in states}
        self.past_states = dict(zip(self.states, past_states, strict=True))
        self.present_states: dict[tuple[StateKind, int], torch.Tensor] = {}
        self._input_ids = input_ids
        self.convolved: torch.Tensor | None = None  # what the running mixer's state keeps
        self._layer: int | None = None  # whose mixer is running

    @cached_property
    def new_tokens(self) -> torch.Tensor:
        """Which slots of this step hold tokens, [B, T] int64: one call of `NewTokens`."""
        found: torch.Tensor = torch.onnx.ops.symbolic(
            f"{DOMAIN}::{NEW_TOKENS}",
            (self.attention_mask, self._input_ids),
            dtype=torch.int64,
            shape=self._input_ids.shape,
            version=1,
        )
        return found

    # transformers passes arguments to these by position and by name. A state that seems not to be
    # there keeps mixers on the road that takes any number of tokens.
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._enter(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._enter(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: Any
    ) -> torch.Tensor:
        self._enter(layer_idx, state_idx)
        self.convolved = conv_states
        return conv_states  # the operator joins past and new by itself

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_kwargs: Any
    ) -> torch.Tensor:
        self._enter(layer_idx, state_idx)
        if recurrent_states is not self.present_states.get(("recurrent", layer_idx)):
            raise ExportError(
                f"layer {layer_idx} computes its recurrent state by itself instead of through one "
                "of transformers' scan functions; this architecture is not supported yet"
            )
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        return False

    def has_previous_state(self, *_args: Any, **_kwargs: Any) -> bool:
        return True

    def _enter(self, layer: int, state: int) -> None:
        if state:
            raise ExportError(f"layer {layer} keeps {state + 1} states of a kind; one is supported")
        self._layer = layer

    def take(self, kind: StateKind) -> tuple[StateShape, torch.Tensor]:
        """The state of the running mixer: its shape and its past.

        Raises:
            ExportError: If no mixer is running, or its state is not declared or already taken.
        """
        key = kind, -1 if self._layer is None else self._layer
        if key not in self.states or key in self.present_states:
            raise ExportError(f"a {kind} state of layer {self._layer} was not expected here")
        return self.states[key], self.past_states[key]

    def missing(self) -> list[str]:
        """Names of the states that no operator has updated."""
        return [s.present for key, s in self.states.items() if key not in self.present_states]
