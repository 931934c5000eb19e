"""The head: found by probing hidden → logits of the reference, never rebuilt from a config.

Accepted is `softcap(scale * (W h + b))` with softcap(x) = c tanh(x / c). Config keys for these
differ between architectures in name and even in sense (one multiplies, another divides), so the
parameters are measured by feeding the head chosen hidden states, and checked on fresh ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headport.errors import ExportError
from headport.export.checkpoint import run_reference
from headport.export.deferred import in_memory, same_value

__all__ = ["HeadTransform", "apply_transform", "fit_head", "is_same", "probe_head"]

_Head = Callable[[torch.Tensor], torch.Tensor]

_ROWS = 8
_TOLERANCE = 2e-5  # of the largest logit of a probe; float32 products stay an order below
_CAPPED = 0.9  # of the softcap; logits above it say little about what was capped
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
    names = {id(p): n for n, p in model.named_parameters()}
    weight_name = names.get(id(weight), "lm_head.weight")
    embedding = model.get_input_embeddings().weight
    with in_memory(module), _backbone_runs_once(model):
        matrix, bias = module.weight.detach(), getattr(module, "bias", None)
        hidden, _ = _run(model, module, None)
        if hidden.shape[-1] != matrix.shape[1]:
            raise ExportError(
                f"{name}: its head maps {hidden.shape[-1]} values, but its matrix is "
                f"{tuple(matrix.shape)}; [vocabulary, hidden size] was expected"
            )
        scale, softcap, found_bias = fit_head(
            lambda h: _run(model, module, h)[1], matrix, bias, hidden, name
        )
    return HeadTransform(
        weight=weight.detach(),
        weight_name=weight_name,
        bias=found_bias,
        scale=scale,
        softcap=softcap,
        tied=is_same(weight, embedding),
    )


@contextmanager
def _backbone_runs_once(model: Any) -> Iterator[None]:
    # Every probe asks the same ids and looks only at what follows the backbone.
    backbone = getattr(model, "base_model", model)
    if backbone is model:
        yield
        return
    forward = backbone.forward
    found: list[Any] = []

    def once(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append(forward(*args, **kwargs))
        return found[0]

    backbone.forward = once
    try:
        yield
    finally:
        del backbone.forward


def is_same(weight: torch.Tensor, embedding: torch.Tensor) -> bool:
    """Whether two matrices are one, by storage or element by element."""
    if weight.shape != embedding.shape:
        return False
    return same_value(weight, embedding) or torch.equal(weight, embedding)


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
    logits_of: _Head,
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
    # Many magnitudes, because only what stays below the cap tells anything.
    probes = [probe(magnitude) for magnitude in (1e-3, 1e-2, 0.1, 1.0, 10.0)]
    products = [(h @ weight.T).double() for h in probes]
    inner = [_uncapped(logits_of(h), softcap) for h in probes]
    at_zero = _uncapped(logits_of(torch.zeros_like(hidden)), softcap)[0]
    fresh = [hidden, probe(0.01), probe(3.0), probe(100.0)]
    worst = ""
    for found in _bias_candidates(bias, products, inner, at_zero):
        offset = 0.0 if found is None else found.double()
        scale = _snapped(_slope([x + offset for x in products], inner))
        parts: dict[str, Any] = {
            "weight": weight,
            "bias": found,
            "scale": scale,
            "softcap": softcap,
        }
        worst = _deviation(logits_of, partial(apply_transform, **parts), fresh)
        if not worst:
            return scale, softcap, found
        worst = f"with scale {scale:g}, softcap {softcap}, bias {found is not None} {worst}"
    raise ExportError(
        f"{name}: its logits are not softcap(scale * (W h + b)) of what its head is given: {worst}"
    )


def _bias_candidates(
    declared: torch.Tensor | None,
    products: list[torch.Tensor],
    inner: list[torch.Tensor],
    at_zero: torch.Tensor,
) -> Iterator[torch.Tensor | None]:
    # The bias of the head's own module is exact; one that the model adds elsewhere is measured.
    yield None if declared is None else declared.detach()
    scale = _slope(products, [y - at_zero for y in inner])
    if scale and torch.isfinite(at_zero).all():
        yield (at_zero / scale).float()


def _slope(x: list[torch.Tensor], y: list[torch.Tensor]) -> float:
    # Least squares through the origin over what is not NaN: sum(x y) / sum(x x).
    pairs = [(a[use], b[use]) for a, b in zip(x, y, strict=True) if (use := ~b.isnan()).any()]
    squares = sum(float((a * a).sum()) for a, _ in pairs)
    return sum(float((a * b).sum()) for a, b in pairs) / squares if squares else 0.0


def _deviation(logits_of: _Head, answer: _Head, probes: list[torch.Tensor]) -> str:
    # Says how the answer misses; empty where it explains every probe.
    for h in probes:
        expected = logits_of(h)
        error = (answer(h) - expected).abs().max().item()
        limit = _TOLERANCE * max(expected.abs().max().item(), 1e-6)
        if not error <= limit:
            return f"they differ by {error:.3g} where {limit:.3g} is rounding"
    return ""


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
    # float64; NaN where the cap has flattened the logit beyond recognition.
    x = logits.double()
    if softcap is None:
        return x
    return torch.where(x.abs() < _CAPPED * softcap, softcap * torch.atanh(x / softcap), torch.nan)


def _snapped(value: float) -> float:
    # Configurations hold short decimals, or divide by one.
    if not value:
        return value
    candidates = (float(f"{value:.6g}"), 1 / float(f"{1 / value:.6g}"))
    nearest = min(candidates, key=lambda candidate: abs(candidate - value))
    return nearest if abs(nearest - value) <= _SNAP * abs(value) else value
