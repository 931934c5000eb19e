"""What an expert computes is measured; what no activation explains is refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from headport.errors import ExportError
from headport.export.expert_function import ExpertLayout
from headport.export.experts import Expert, measure_expert


def halves(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = h.chunk(2, dim=-1)
    return gate, up


def clamped(h: torch.Tensor) -> torch.Tensor:
    """gpt-oss's gate, interleaved."""
    gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def limited_silu(h: torch.Tensor) -> torch.Tensor:
    gate, up = halves(h)
    return functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)


SWIGLU = ExpertLayout("swiglu")


@pytest.mark.parametrize(
    ("inner", "gated", "expected"),
    [
        (lambda h: functional.silu(halves(h)[0]) * halves(h)[1], True, Expert(SWIGLU)),
        (
            lambda h: functional.gelu(halves(h)[0]) * halves(h)[1],
            True,
            Expert(ExpertLayout("gelu")),
        ),
        (
            lambda h: functional.gelu(halves(h)[0], approximate="tanh") * halves(h)[1],
            True,
            Expert(ExpertLayout("gelutanh")),
        ),
        (
            clamped,
            True,
            Expert(ExpertLayout("swiglu", clamped=True, interleaved=True), 1.702, 1.0, 7.0),
        ),
        (limited_silu, True, Expert(ExpertLayout("swiglu", clamped=True), 1.0, 0.0, 10.0)),
        (functional.silu, False, Expert(ExpertLayout("swiglu", gated=False))),
        (lambda h: functional.relu(h) ** 2, False, Expert(ExpertLayout("relu2", gated=False))),
    ],
)
def test_the_activation_is_found(inner: object, gated: bool, expected: Expert) -> None:
    assert measure_expert(inner, gated=gated, name="Experts") == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inner", "gated"),
    [
        (lambda h: torch.tanh(halves(h)[0]) * halves(h)[1], True),
        (lambda h: functional.silu(halves(h)[0]) * halves(h)[1] ** 2, True),
        # A limit on one side only is not the clamp that can be exported.
        (lambda h: functional.silu(halves(h)[0]) * halves(h)[1].clamp(max=7.0), True),
        (torch.sin, False),
    ],
)
def test_what_nothing_explains_is_refused(inner: object, gated: bool) -> None:
    with pytest.raises(ExportError, match=r"Experts: what its experts compute.*refused"):
        measure_expert(inner, gated=gated, name="Experts")  # type: ignore[arg-type]
