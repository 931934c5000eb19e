"""The head: found by probing hidden → logits of the reference, never rebuilt from a config.

Accepted is `softcap(scale * (W h + b))` with softcap(x) = c tanh(x / c). Config keys for these
differ between architectures in name and even in sense (one multiplies, another divides), so the
parameters are measured by feeding the head chosen hidden states, and checked on fresh ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headport.errors import ExportError
from headport.export.checkpoint import run_reference

__all__ = ["HeadTransform", "apply_transform", "fit_head", "probe_head"]

_ROWS = 8
_TOLERANCE = 2e-5  # of the largest logit of a probe; float32 products stay an order below
_SNAP = 2e-6  # a measured constant this close to a short decimal is that decimal


@dataclass(frozen=True)
class HeadTransform:
    """logits = softcap(scale * (W h + b))."""

    weight: torch.Tensor  # W [V, H], the model's own tensor
    weight_name: str
    bias: torch.Tensor | None  # b [V]
    scale: float
    softcap: float | None
    tied: bool  # W equals the input embedding, by storage or element by element


def probe_head(model: Any) -> HeadTransform:
    """Find the head of a causal language model.

    Args:
        model: A float32 transformers model.

    Raises:
        ExportError: If there is no single output matrix, or it does not explain the logits.
    """
    name = type(model).__name__
    module = model.get_output_embeddings()
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        raise ExportError(f"{name}: one output matrix was expected, found {type(module).__name__}")
    bias = getattr(module, "bias", None)
    hidden, _ = _run(model, module, None)
    if hidden.shape[-1] != weight.shape[1]:
        raise ExportError(
            f"{name}: its head maps {hidden.shape[-1]} values, but its matrix is "
            f"{tuple(weight.shape)}; [vocabulary, hidden size] was expected"
        )
    scale, softcap, found_bias = fit_head(
        lambda h: _run(model, module, h)[1], weight.detach(), bias, hidden, name
    )
    names = {id(p): n for n, p in model.named_parameters()}
    embedding = model.get_input_embeddings().weight
    return HeadTransform(
        weight=weight.detach(),
        weight_name=names.get(id(weight), "lm_head.weight"),
        bias=found_bias,
        scale=scale,
        softcap=softcap,
        tied=_same(weight, embedding),
    )


def _same(weight: torch.Tensor, embedding: torch.Tensor) -> bool:
    if weight.shape != embedding.shape:
        return False
    return weight.data_ptr() == embedding.data_ptr() or torch.equal(weight, embedding)


@torch.no_grad()
def _run(
    model: Any, module: torch.nn.Module, hidden: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    # hidden [N, H] replaces what the backbone hands to the head; gives (hidden, logits [N, V]).
    seen: list[torch.Tensor] = []

    def replace(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
        given = inputs[0] if hidden is None else hidden[None].to(inputs[0].dtype)
        seen.append(given)
        return (given, *inputs[1:])

    generator = torch.Generator().manual_seed(0)
    rows = _ROWS if hidden is None else hidden.shape[0]
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, size, (1, rows), generator=generator)
    hook = module.register_forward_pre_hook(replace)
    try:
        logits = run_reference(model, input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    if len(seen) != 1 or seen[0].dim() != 3 or logits.dim() != 3:
        raise ExportError(
            f"{type(model).__name__}: its head was expected to run once on [1, {rows}, H] and give "
            f"[1, {rows}, V]; it ran {len(seen)} times and gave {list(logits.shape)}"
        )
    return seen[0][0], logits[0]


@torch.no_grad()
def fit_head(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    hidden: torch.Tensor,
    name: str,
) -> tuple[float, float | None, torch.Tensor | None]:
    """Fit scale, softcap and bias of a head that is known by what it answers.

    Args:
        logits_of: The head: hidden states [N, H] → logits [N, V].
        weight: W [V, H].
        bias: The bias its module declares, [V], or None.
        hidden: Hidden states as they occur, [N, H]; used to check the fit.
        name: Names the model in messages.

    Returns:
        scale, softcap (None: no cap), bias (None: no bias).

    Raises:
        ExportError: If `softcap(scale * (W h + b))` does not explain the answers.
    """
    rows, size = hidden.shape
    generator = torch.Generator().manual_seed(1)

    def probe(magnitude: float) -> torch.Tensor:
        # Hidden states whose largest product with W is `magnitude`.
        h = torch.randn((rows, size), generator=generator)
        return h * (magnitude / (h @ weight.T).abs().max().clamp_min(1e-30))

    far, farther = (logits_of(probe(m)).abs().max().item() for m in (1e6, 1e8))
    softcap = _snapped(farther) if farther <= far * (1 + 1e-6) else None
    near = probe(1.0)
    at_zero = _uncapped(logits_of(torch.zeros_like(near)), softcap)
    change = (_uncapped(logits_of(near), softcap) - at_zero).double()
    product = (near @ weight.T).double()
    scale = _snapped(((change * product).sum() / (product * product).sum()).item())
    offset = at_zero[0] / scale if scale else at_zero[0]
    # The module's own bias is exact; one that is added elsewhere in the model is measured.
    declared = torch.zeros_like(offset) if bias is None else bias.detach()
    if torch.allclose(declared, offset, rtol=_TOLERANCE, atol=_TOLERANCE):
        found = None if bias is None else bias.detach()
    else:
        found = offset.clone()
    for h in (hidden, probe(0.01), probe(3.0), probe(100.0)):
        expected = logits_of(h)
        answer = apply_transform(h, weight, found, scale, softcap)
        error = (answer - expected).abs().max().item()
        limit = _TOLERANCE * max(expected.abs().max().item(), 1e-6)
        if not error <= limit:
            raise ExportError(
                f"{name}: its logits are not softcap(scale * (W h + b)) of what its head is given: "
                f"with scale {scale:g}, softcap {softcap}, bias {found is not None} they differ "
                f"by {error:.3g} where {limit:.3g} is rounding"
            )
    return scale, softcap, found


def apply_transform(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """softcap(scale * (W h + b)) for hidden states [N, H]; returns [N, V]."""
    x = torch.nn.functional.linear(hidden, weight, bias) * scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def _uncapped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    if softcap is None:
        return logits
    ratio = (logits.double() / softcap).clamp(-1 + 1e-12, 1 - 1e-12)
    return (softcap * torch.atanh(ratio)).to(logits.dtype)


def _snapped(value: float) -> float:
    for candidate in (float(f"{value:.6g}"), 1 / float(f"{1 / value:.6g}") if value else 0.0):
        if abs(candidate - value) <= _SNAP * abs(value):
            return candidate
    return value
