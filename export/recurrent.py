"""Recurrent layers as calls of a few operators, whatever the architecture.

transformers' mixers hand their recurrences to functions of a fixed signature, so that kernels can
take their place: a causal convolution, a selective scan, its form for heads, the gated delta rule,
and the masking of padding. Our functions stand there while a model is traced and emit
`CausalConvolution`, `SelectiveScan`, `StateSpaceDual` and `GatedDeltaRule`; projections, norms,
gates and time steps stay the mixer's own.
The cache says which layer is meant: a mixer asks it for the layer's states just before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers.activations import ACT2FN

from headport.errors import ExportError
from headport.export.attention import TracedCache
from headport.export.functions import DOMAIN
from headport.export.recurrent_cache import RecurrentCache
from headport.export.recurrent_functions import CONVOLUTION
from headport.export.scan_functions import DELTA_RULE, DUAL_SCAN, LINEAR_SCAN, SELECTIVE_SCAN

__all__ = ["convolve", "emit_scan", "one_recurrence"]


_Active = ContextVar[TracedCache | None]


@contextmanager
def one_recurrence(model: torch.nn.Module, active: _Active) -> Iterator[None]:
    """Route all recurrences of a model through the operators while the context lasts.

    Args:
        model: A transformers model.
        active: Holds the cache of the forward pass that is traced, a `RecurrentCache`.
    """
    functions = {name: _bound(function, active) for name, function in _KERNELS.items()} | {
        name: _refusal(what) for name, what in _UNSUPPORTED.items()
    }
    modules = {type(module).__module__ for module in model.modules()}
    replaced = [
        (vars(sys.modules[module]), name, vars(sys.modules[module])[name])
        for module in sorted(modules)
        for name in functions
        if module.startswith("transformers.models.") and name in vars(sys.modules[module])
    ]
    try:
        for namespace, name, _ in replaced:
            namespace[name] = functions[name]
        yield
    finally:
        for namespace, name, original in replaced:
            namespace[name] = original


def _bound(function: Callable[..., Any], active: _Active) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        cache = active.get()
        if not isinstance(cache, RecurrentCache):
            raise ExportError("a recurrent layer runs, but the model's cache holds no states")
        return function(cache, *args, **kwargs)

    return call


def _refusal(what: str) -> Callable[..., Any]:
    def call(*_args: Any, **_kwargs: Any) -> Any:
        raise ExportError(f"{what} is not supported yet")

    return call


def _unmasked(_cache: RecurrentCache, hidden_states: torch.Tensor, _mask: Any) -> torch.Tensor:
    return hidden_states  # the operators know which tokens are padding


def convolve(
    cache: RecurrentCache,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The running mixer's convolution, as a call of `CausalConvolution_K`.

    Args:
        cache: Its state's shape and past are taken from it.
        hidden_states: [B, C, T], as `update_conv_state` was given them.
        weight: [C, K].
        bias: [C].
        activation: Name of what follows, None for nothing.
        **kwargs: What else transformers passes; packed sequences are refused.

    Returns:
        [B, C, T].
    """
    _check_unpacked(kwargs)
    state, past = cache.take("conv")
    if hidden_states is not cache.convolved:
        raise ExportError(f"layer {state.layer} convolves other values than its state keeps")
    rows = hidden_states.transpose(1, 2).to(weight.dtype)  # as transformers' own function does
    if state.dims != (weight.shape[0], weight.shape[1] - 1):
        raise ExportError(
            f"layer {state.layer} convolves with a kernel of {tuple(weight.shape)} but keeps a "
            f"state of {state.dims}"
        )
    y, present = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{CONVOLUTION}_{weight.shape[1]}",
        (rows, past, cache.new_tokens, weight),
        dtypes=(rows.dtype, past.dtype),
        shapes=(rows.shape, past.shape),
        version=1,
    )
    cache.present_states["conv", state.layer] = present
    if bias is not None:
        y = y + bias
    y = y.transpose(1, 2).to(hidden_states.dtype)
    return y if activation is None else ACT2FN[activation](y)


def _selective_scan(  # noqa: PLR0917, the signature is transformers'
    cache: RecurrentCache,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_kwargs: Any,
) -> Any:
    # hidden_states, dt, z [B, D, T]; A [D, N]; B, C [B, N, T]; returns y [B, D, T] float32
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    rows = hidden_states.transpose(1, 2)
    steps = _softplus(dt, delta_softplus).transpose(1, 2)
    B, C = B.transpose(1, 2), C.transpose(1, 2)
    y, present = emit_scan(cache, SELECTIVE_SCAN, (rows, steps, A, B, C), rows.shape)
    if D is not None:
        y = y + rows * D
    y = y.transpose(1, 2)
    if z is not None:
        y = y * torch.nn.functional.silu(z)
    return (y, present) if return_last_state else y


def _dual_scan(  # noqa: PLR0917, the signature is transformers'
    cache: RecurrentCache,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    # hidden_states [B, T, H, P]; dt [B, T, H]; A [H]; B, C [B, T, G, N]; returns [B, T, H, P]
    _check_unpacked(kwargs)
    if z is not None:
        raise ExportError("a gate inside the scan is not supported yet")
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    dt = _limited(_softplus(dt, dt_softplus), *dt_limit)
    y, present = emit_scan(cache, DUAL_SCAN, (hidden_states, dt, A, B, C), hidden_states.shape)
    if D is not None:
        y = y + D[..., None] * hidden_states
    return (y, present) if return_final_states else y


def _delta_rule(  # noqa: PLR0917, the signature is transformers'
    cache: RecurrentCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,  # noqa: ARG001
    initial_state: torch.Tensor | None = None,  # noqa: ARG001
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    # query, key [B, T, G, N]; value [B, T, H, P]; g, beta [B, T, H]; returns [B, T, H, P]
    _check_unpacked(kwargs)
    query, key = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    y, present = emit_scan(cache, DELTA_RULE, (query, key, value, g, beta), value.shape)
    return y.to(value.dtype), present if output_final_state else None


def emit_scan(
    cache: RecurrentCache, name: str, inputs: Sequence[torch.Tensor], shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """The running mixer's recurrence, as a call of the function `name`.

    Args:
        cache: Its state's shape and past are taken from it.
        name: The function, of `headport.export.recurrent_functions`.
        inputs: What it takes before the past state.
        shape: Of what it gives for the tokens.

    Returns:
        What it gives for the tokens, and the next state; both float32.
    """
    state, past = cache.take("recurrent")
    expected = _state_dims(name, inputs)
    if state.dims != expected:
        raise ExportError(
            f"layer {state.layer} keeps a state of {state.dims} where its {name} has one of "
            f"{expected}; this architecture is not supported yet"
        )
    y, present = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        (*inputs, past, cache.new_tokens),
        dtypes=(torch.float32, torch.float32),
        shapes=(shape, past.shape),
        version=1,
    )
    cache.present_states["recurrent", state.layer] = present
    return y, present


def _state_dims(name: str, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    if name == LINEAR_SCAN:
        return (inputs[0].shape[2],)
    if name == SELECTIVE_SCAN:
        return tuple(inputs[2].shape)  # A
    if name == DUAL_SCAN:
        x, B = inputs[0], inputs[3]
        return (*x.shape[2:], B.shape[3])
    key, value = inputs[1], inputs[2]
    return value.shape[2], key.shape[3], value.shape[3]


def _softplus(dt: torch.Tensor, wanted: bool) -> torch.Tensor:
    return torch.nn.functional.softplus(dt) if wanted else dt


def _limited(dt: torch.Tensor, low: float, high: float) -> torch.Tensor:
    # An infinite limit is none; written as a constant it would not be a finite number.
    if low <= 0.0 and high == float("inf"):
        return dt
    return torch.clamp(dt, min=low, max=None if high == float("inf") else high)


def _check_unpacked(kwargs: dict[str, Any]) -> None:
    packed = [n for n in ("seq_idx", "cu_seqlens") if kwargs.get(n) is not None]
    if packed:
        raise ExportError(f"a recurrent layer takes {', '.join(packed)}, which is not supported")


# Name in transformers' modelling files → what stands there during a trace.
_KERNELS: dict[str, Callable[..., Any]] = {
    "apply_mask_to_padding_states": _unmasked,
    "causal_conv1d_fn": convolve,
    "mamba_selective_scan": _selective_scan,
    "mamba2_chunk_scan": _dual_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
}
# Roads a trace must not take, and recurrences without an operator.
_UNSUPPORTED = {
    "causal_conv1d_update": "a convolution of exactly one token",
    "mamba_selective_state_update": "a scan of exactly one token",
    "mamba2_selective_state_update": "a scan of exactly one token",
    "torch_recurrent_gated_delta_rule": "the gated delta rule for exactly one token",
    "chunk_kimi_delta_attention": "Kimi delta attention (a decay per key channel)",
    "recurrent_kimi_delta_attention": "Kimi delta attention (a decay per key channel)",
}
