"""What a recurrent layer keeps between steps: states of a fixed size, however many tokens came.

A convolution keeps the last K - 1 inputs of each channel, a recurrence its hidden state. Both are
ports of the backbone beside keys and values: `past_conv_states.N` → `present_conv_states.N` and
`past_recurrent_states.N` → `present_recurrent_states.N` for layer N of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headport.errors import ExportError
from headport.export.scan_functions import CHUNK

__all__ = ["StateKind", "StateShape", "chunk_lengths", "layer_states"]

StateKind = Literal["conv", "recurrent"]


@dataclass(frozen=True)
class StateShape:
    """One state: [B, *dims].

    conv: dims are (channels, K - 1), in the model's type. recurrent: as transformers keeps it, such
    as (D, N) or (H, P, N); always float32.
    """

    layer: int  # of the model, as are the keys' and values'
    kind: StateKind
    dims: tuple[int, ...]

    @property
    def past(self) -> str:
        """Name of the input port."""
        return f"past_{self.kind}_states.{self.layer}"

    @property
    def present(self) -> str:
        """Name of the output port."""
        return f"present_{self.kind}_states.{self.layer}"

    def dtype(self, model: torch.dtype) -> torch.dtype:
        """Type of the state in a model of that type."""
        return model if self.kind == "conv" else torch.float32

    def zeros(self, batch: int, model: torch.dtype) -> torch.Tensor:
        """The state before the first token."""
        return torch.zeros((batch, *self.dims), dtype=self.dtype(model))


def layer_states(layer: Any, index: int) -> Iterator[StateShape]:
    """The states of one layer of a cache that the model itself has filled.

    Args:
        layer: A layer of a transformers cache, of any kind.
        index: Its place in the model.

    Raises:
        ExportError: If it keeps more than one state of a kind, or a convolution state of another
            shape.
    """
    kept = {"conv": _kept(layer, "conv_states"), "recurrent": _kept(layer, "recurrent_states")}
    for kind, states in kept.items():
        if len(states) > 1:
            raise ExportError(
                f"layer {index} keeps {len(states)} {kind} states; one is supported so far"
            )
    for conv in kept["conv"]:
        if conv.dim() != 3:
            raise ExportError(
                f"layer {index} keeps a convolution state of shape {tuple(conv.shape)}; "
                "[batch, channels, width] was expected"
            )
        # transformers keeps one input more than the next token needs.
        yield StateShape(index, "conv", (conv.shape[1], conv.shape[2] - 1))
    for hidden in kept["recurrent"]:
        yield StateShape(index, "recurrent", tuple(hidden.shape[1:]))


def chunk_lengths(shapes: Iterable[object]) -> tuple[int, ...]:
    """Lengths that a comparison must exceed: a state per head is moved a chunk at a time."""
    heads = any(
        isinstance(s, StateShape) and s.kind == "recurrent" and len(s.dims) == 3 for s in shapes
    )
    return (CHUNK,) if heads else ()


def _kept(layer: Any, name: str) -> list[torch.Tensor]:
    return [s for s in getattr(layer, name, {}).values() if isinstance(s, torch.Tensor)]
