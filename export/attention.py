"""One attention function for every architecture, emitted as a call of `CachedAttention`.

transformers lets a caller register an attention function and a mask function under one name. Ours
turn each layer's attention into a single symbolic operator; the mask function returns a marker
instead of a tensor, which carries the layer's window through the model. The KV cache handed to the
model returns full-length keys and values, so that shape arithmetic in model code is right, and
remembers the new ones, which is what the operator takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache

from headport.errors import ExportError
from headport.export.functions import DOMAIN, attention_name

__all__ = [
    "MaskSpec",
    "TracedCache",
    "attend",
    "causal_mask",
    "one_attention",
    "refuse_arguments",
    "traced_cache",
]

_IMPLEMENTATION = "headport"
# Arguments that do not change the scores: dropout is off in evaluation, the window is the mask's,
# positions are already in the queries and keys. Any other one is refused, not ignored.
_HARMLESS = frozenset(
    {
        "dropout",
        "sliding_window",
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)


_OWN_ATTENTION = (
    "attention is computed by the model itself instead of through transformers' attention "
    "interface, and no adapter is known for it; this architecture is refused"
)


class MaskSpec:
    """What a layer may attend to; travels through the model in place of a mask tensor.

    A mask that cannot be expressed is an error only where a layer uses it: models make masks of
    every kind they know, also of kinds that none of their layers has.
    """

    ndim = 2  # some models look at it before they pass the mask on

    def __init__(self, window: int, fault: str = "") -> None:
        self._window = window
        self._fault = fault

    @property
    def window(self) -> int:
        """Positions a token sees, itself included; 0 for all before it."""
        if self._fault:
            raise ExportError(self._fault)
        return self._window

    @classmethod
    def __torch_function__(cls, *_args: Any, **_kwargs: Any) -> Any:
        raise ExportError(_OWN_ATTENTION)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ExportError(_OWN_ATTENTION)

    def to(self, *_args: Any, **_kwargs: Any) -> MaskSpec:
        """Return itself: models move and cast masks."""
        return self


@dataclass(frozen=True)
class _Update:
    """What one layer put into the cache, and the full-length tensors it got back."""

    layer: int
    key: torch.Tensor | None  # None where attention's own keys and values are cached
    value: torch.Tensor | None
    full_key: torch.Tensor
    full_value: torch.Tensor


class TracedCache(Cache):  # type: ignore[misc]  # transformers is not type-checked
    """A KV cache whose past are graph inputs and whose presents are the operator's outputs.

    Args:
        past_keys: Per layer, [B, KV, P, D].
        past_values: Per layer, [B, KV, P, Dv].
        attention_mask: [B, P + T] int64, 1 where a slot holds a token.
        layers: Layer of the model of each of them; None: the first, the second and so on.

    `expanded` are layers whose keys and values are cached as attention takes them, while the model
    caches something smaller that it expands first (latents).
    """

    def __init__(
        self,
        past_keys: Sequence[torch.Tensor],
        past_values: Sequence[torch.Tensor],
        attention_mask: torch.Tensor,
        layers: Sequence[int] | None = None,
    ) -> None:
        layers = range(len(past_keys)) if layers is None else layers
        self.past_keys = dict(zip(layers, past_keys, strict=True))
        self.past_values = dict(zip(layers, past_values, strict=True))
        self.attention_mask = attention_mask
        self.expanded: frozenset[int] = frozenset()
        self.present: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.pending: _Update | None = None
        self.layers: list[Any] = []
        self.layer_class_to_replicate = None
        self.offloading = False

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self.present or layer_idx not in self.past_keys:
            raise ExportError(f"attention layer {layer_idx} was reached twice or is not declared")
        if layer_idx in self.expanded:
            # What attention is given for these tokens is what will be cached.
            self.pending = _Update(layer_idx, None, None, key, value)
            return key, value
        # Only their shape matters: the operator joins past and new by itself. Taking the length
        # from the mask keeps sums of symbols out of the tracer, which is much faster.
        total = self.attention_mask.shape[1]
        full_key = key.new_empty((*key.shape[:2], total, key.shape[3]))
        full_value = value.new_empty((*value.shape[:2], total, value.shape[3]))
        self.pending = _Update(layer_idx, key, value, full_key, full_value)
        return full_key, full_value

    # transformers passes arguments to these by position and by name.
    def get_seq_length(self, layer_idx: int = 0) -> Any:  # noqa: ARG002
        return next(iter(self.past_keys.values())).shape[2]

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[Any, int]:  # noqa: ARG002
        return self.attention_mask.shape[1], 0

    def __len__(self) -> int:
        return len(self.past_keys)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        # The marker carries each layer's window; the cache itself never drops a token.
        return [False] * len(self)

    is_linear = is_sliding
    is_dummy = is_sliding


_active: ContextVar[TracedCache | None] = ContextVar("traced_cache", default=None)


def traced_cache() -> TracedCache:
    """The cache of the forward pass that is traced, for modules that are not handed one."""
    cache = _active.get()
    assert cache is not None, "only called in a trace"
    return cache


@contextmanager
def one_attention(
    model: PreTrainedModel,
    function: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
) -> Iterator[ContextVar[TracedCache | None]]:
    """Route all attention of a model through one function while the context lasts.

    The caller sets the yielded variable to the cache of the forward pass that is traced.

    Args:
        model: Whose configurations are switched over.
        function: As transformers calls it; None: `attend`.
        mask: Likewise; None: `causal_mask`.
    """
    AttentionInterface.register(_IMPLEMENTATION, function or attend)
    AttentionMaskInterface.register(_IMPLEMENTATION, mask or causal_mask)
    # `set_attn_implementation` only warns for models that do not support an implementation; the
    # number of operators in the graph is counted instead.
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    found = [(c, c._attn_implementation) for c in configs.values()]
    token = _active.set(None)
    try:
        for config, _ in found:
            config._attn_implementation = _IMPLEMENTATION
        yield _active
    finally:
        for config, implementation in found:
            config._attn_implementation = implementation
        _active.reset(token)


def causal_mask(mask_function: Any = None, use_vmap: bool = False, **_kwargs: Any) -> MaskSpec:
    """What a mask function of transformers lets a token see, as the marker of a layer."""
    if use_vmap:
        return MaskSpec(
            0,
            "the model combines its causal mask with a custom mask function, "
            "which the exported attention cannot express",
        )
    # The mask function itself says what it does; the other arguments are hints, and a chunked
    # mask passes the same hint as a sliding one.
    parts = [mask_function]
    if mask_function.__qualname__ == "and_masks.<locals>.and_mask":
        parts = list(inspect.getclosurevars(mask_function).nonlocals["mask_functions"])
    windows = []
    for part in parts:
        if part.__qualname__ == "sliding_window_overlay.<locals>.inner_mask":
            windows.append(int(inspect.getclosurevars(part).nonlocals["sliding_window"]))
        elif part.__qualname__ != "causal_mask_function":
            return MaskSpec(
                0,
                "a causal mask with or without a sliding window was expected, "
                f"the model builds {part.__qualname__.split('.')[0]}",
            )
    if len(parts) - len(windows) != 1 or any(window < 1 for window in windows):
        return MaskSpec(
            0, f"one causal mask and windows of at least 1 were expected, found windows {windows}"
        )
    return MaskSpec(min(windows, default=0))


def refuse_arguments(kind: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of a layer's attention that the operator cannot express.

    Args:
        kind: Names the layer in messages.
        arguments: By name; one that is None or False says nothing.

    Raises:
        ExportError: Naming those that would change the scores.
    """
    given = {name for name, value in arguments.items() if value is not None and value is not False}
    odd = sorted(given - _HARMLESS)
    if odd:
        raise ExportError(f"{kind}: attention takes {', '.join(odd)}, which is not supported")


def attend(  # noqa: PLR0917, the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    rounded_slopes: bool = False,
    relative: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer in a trace, as transformers calls it.

    Args:
        module: The layer, named in messages.
        query: [B, Hq, T, D].
        key: What the cache's `update` returned, [B, KV, P + T, D].
        value: Likewise, [B, KV, P + T, Dv].
        attention_mask: The marker that the mask function made.
        scaling: Of the scores; default D ** -0.5.
        softcap: Of the scores; None or 0 for none.
        s_aux: Attention sinks, [Hq].
        slopes: ALiBi: `slope · (position of the key − position of the query)` is added to the
            scaled scores, [Hq].
        rounded_slopes: The product is rounded to bfloat16 and scaled like the scores.
        relative: Added to the scaled scores by distance, the last row for all from there on,
            [R, Hq].
        is_causal: Must not be False.
        kwargs: Arguments that change nothing; any other one is refused.

    Returns:
        [B, T, Hq, Dv], and None in place of attention weights.

    Raises:
        ExportError: If the layer wants something that the operator cannot express.
    """
    kind, cache = type(module).__name__, _active.get()
    pending = cache.pending if cache is not None else None
    if cache is None or pending is None:
        raise ExportError(f"{kind}: attention without a KV cache (encoder or cross-attention)")
    cache.pending = None
    layer, new_key, new_value = pending.layer, pending.key, pending.value
    if new_key is None or new_value is None:
        new_key, new_value = key, value
    elif key is not pending.full_key or value is not pending.full_value:
        raise ExportError(f"{kind}: keys or values change after they enter the KV cache")
    if not isinstance(attention_mask, MaskSpec):
        raise ExportError(f"{kind}: the attention mask is not made by the mask interface")
    window = attention_mask.window
    if is_causal is False:
        raise ExportError(f"{kind}: attention that is not causal")
    refuse_arguments(kind, kwargs)
    past_key, past_value = cache.past_keys[layer], cache.past_values[layer]
    batch, heads, tokens, size = query.shape
    total = cache.attention_mask.shape[1]
    inputs = [query, new_key, new_value, past_key, past_value, cache.attention_mask]
    inputs += [extra for extra in (s_aux, slopes, relative) if extra is not None]
    name = attention_name(
        sinks=s_aux is not None,
        slopes=slopes is not None,
        rounded=slopes is not None and rounded_slopes,
        relative=relative is not None,
        softcap=bool(softcap),
        window=bool(window),
    )
    y, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        inputs,
        attrs={
            "scale": float(scaling if scaling is not None else size**-0.5),
            "window": window,
            "softcap": float(softcap or 0.0),
        },
        dtypes=(query.dtype, new_key.dtype, new_value.dtype),
        shapes=(
            (batch, tokens, heads, new_value.shape[3]),
            (batch, new_key.shape[1], total, new_key.shape[3]),
            (batch, new_value.shape[1], total, new_value.shape[3]),
        ),
        version=1,
    )
    cache.present[layer] = (present_key, present_value)
    return y, None
