"""The attention of both halves in a trace: to a source, and of a decoder to its own tokens.

transformers calls one attention function for all of them. Which one a call is shows in what it is
handed: cross keys are the very tensors of the traced inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from headport.errors import ExportError
from headport.export.attention import (
    MaskSpec,
    attend,
    causal_mask,
    refuse_arguments,
)
from headport.export.encoder_decoder.relative import RelativeBias
from headport.export.functions import DOMAIN
from headport.export.source_function import source_attention_name

__all__ = [
    "CrossCache",
    "DecoderAttention",
    "EncoderAttention",
    "RecordedCross",
    "SourceSpec",
    "any_mask",
    "empty_cache",
]


class SourceSpec(MaskSpec):
    """All of a source may be seen; travels through the model in place of a mask tensor."""

    def __init__(self) -> None:
        super().__init__(0, "a mask that looks both ways was made for a decoder's own tokens")


def any_mask(mask_function: Any = None, use_vmap: bool = False, **kwargs: Any) -> MaskSpec:
    """What transformers' mask function lets a token see, as the marker of a layer."""
    if not use_vmap and mask_function.__qualname__ == "bidirectional_mask_function":
        return SourceSpec()
    return causal_mask(mask_function, use_vmap, **kwargs)


def _to_source(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    batch, heads, tokens, size = query.shape
    if key.shape[1] != heads:
        raise ExportError(f"{heads} query heads and {key.shape[1]} key heads; equal ones expected")
    inputs = [query, key, value, *(x for x in (mask, bias) if x is not None)]
    name = source_attention_name(mask=mask is not None, bias=bias is not None)
    found: torch.Tensor = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{name}",
        inputs,
        attrs={"scale": float(scale if scale is not None else size**-0.5)},
        dtype=query.dtype,
        shape=(batch, tokens, heads, value.shape[3]),
        version=1,
    )
    return found


class EncoderAttention:
    """Attention in the trace of an encoder. `layers` counts its calls.

    `mask` [B, S] says which places hold something; None: all. Once `decoding`, the model's decoder
    runs only for the keys and values it makes of the source, and what it attends to is dropped.
    """

    def __init__(self) -> None:
        self.mask: torch.Tensor | None = None
        self.decoding = False
        self.layers = 0

    def __call__(  # noqa: PLR0917, the signature is transformers'
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if self.decoding:
            batch, heads, tokens, _ = query.shape
            return query.new_empty((batch, tokens, heads, value.shape[3])), None
        kind = type(module).__name__
        refuse_arguments(kind, kwargs)
        if attention_mask is not None and not isinstance(attention_mask, SourceSpec):
            raise ExportError(f"{kind}: the encoder's attention mask does not look both ways")
        if self.mask is not None and attention_mask is None:
            raise ExportError(f"{kind}: the encoder leaves out the mask of its source")
        self.layers += 1
        mask, bias = self.mask, position_bias
        return _to_source(query, key, value, mask=mask, bias=bias, scale=scaling), None


class DecoderAttention:
    """Attention in the trace of a decoder: cached of its own tokens, or to the source.

    `cross` is set to the cache of the forward pass that is traced.
    """

    def __init__(self) -> None:
        self.cross: CrossCache | None = None

    def __call__(  # noqa: PLR0917, the signature is transformers'
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        position_bias: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        assert self.cross is not None
        kind = type(module).__name__
        layer = self.cross.layer_of(key, value)
        if layer is None:
            if position_bias is not None and not isinstance(position_bias, RelativeBias):
                raise ExportError(f"{kind}: a bias of scores that depends on more than distance")
            relative = None if position_bias is None else position_bias.table
            return attend(
                *(module, query, key, value, attention_mask),
                scaling=scaling,
                relative=relative,
                **kwargs,
            )
        refuse_arguments(kind, kwargs)
        # A bias of zeros is handed on where a layer has no positions of its own.
        if position_bias is not None and getattr(module, "has_relative_attention_bias", True):
            raise ExportError(f"{kind}: cross-attention with relative positions")
        self.cross.read.add(layer)
        mask = self.cross.mask
        return _to_source(query, key, value, mask=mask, bias=None, scale=scaling), None


class _BareCache(Cache):  # type: ignore[misc]  # transformers is not type-checked
    """What every cache below has in common: nothing held, and no layers of transformers' kinds."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.layer_class_to_replicate = None
        self.offloading = False

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0

    def __len__(self) -> int:
        # A model may ask whether there is a cache by whether it is empty.
        return 1

    @property
    def is_compileable(self) -> bool:
        return False


class CrossCache(_BareCache):
    """Cross keys and values that are there already, as graph inputs.

    Args:
        keys: Per layer, [B', H, S, D].
        values: Likewise.
        mask: [B', S] int64, 1 where a place holds something.

    `read` are the layers whose attention has read theirs.
    """

    def __init__(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], mask: torch.Tensor
    ) -> None:
        super().__init__()
        self.layers = [SimpleNamespace(keys=k, values=v) for k, v in zip(keys, values, strict=True)]
        self.mask = mask
        self.read: set[int] = set()

    def layer_of(self, key: torch.Tensor, value: torch.Tensor) -> int | None:
        """The layer that these keys and values are; None where they are something else.

        Raises:
            ExportError: If keys and values of different layers come together.
        """
        places = [n for n, layer in enumerate(self.layers) if layer.keys is key]
        if not places:
            return None
        [layer] = places
        if self.layers[layer].values is not value:
            raise ExportError(f"cross keys of layer {layer} come with other values")
        return layer

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 1  # all that is asked is whether there are any

    def __len__(self) -> int:
        return len(self.layers)


class RecordedCross(_BareCache):
    """Takes down the keys and values that a decoder makes of a source: layer → both."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self.made:
            raise ExportError(f"cross-attention layer {layer_idx} was reached twice")
        self.made[layer_idx] = (key, value)
        return key, value


class _OneToken(_BareCache):
    """A decoder's own cache before its first token, of which nothing is kept."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[Any, int]:  # noqa: ARG002
        return query_length, 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    is_linear = is_sliding
    is_dummy = is_sliding


def empty_cache(cross: RecordedCross) -> EncoderDecoderCache:
    """The cache of a decoder before its first token, whose cross keys and values are recorded."""
    return EncoderDecoderCache(_OneToken(), cross)
