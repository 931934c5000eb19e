"""The head is measured: what it multiplies, adds, scales and caps is found, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headport.errors import ExportError
from headport.export.checkpoint import find_checkpoint, load_model
from headport.export.head import apply_transform, fit_head, probe_head
from headport.export.precision import parameter_bytes

V, H = 31, 13
Fn = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn((V, H), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def hidden() -> torch.Tensor:
    return 3 * torch.randn((8, H), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("scale", [1.0, 0.0625, 16.0, 1 / 6, 8.0, -2.0])
@pytest.mark.parametrize("softcap", [None, 1.0, 30.0])
@pytest.mark.parametrize("biased", [False, True])
def test_every_combination_is_found(
    weight: torch.Tensor, hidden: torch.Tensor, scale: float, softcap: float | None, biased: bool
) -> None:
    bias = torch.linspace(-1, 2, V) if biased else None

    def head(h: torch.Tensor) -> torch.Tensor:
        return apply_transform(h, weight, bias, scale, softcap)

    found_scale, found_softcap, found_bias = fit_head(head, weight, bias, hidden, "M")
    assert found_scale == pytest.approx(scale, rel=1e-6)
    assert found_softcap == (None if softcap is None else pytest.approx(softcap, rel=1e-6))
    assert (found_bias is None) == (not biased)


def test_a_bias_outside_the_module_is_measured(weight: torch.Tensor, hidden: torch.Tensor) -> None:
    bias = torch.linspace(-1, 2, V)
    _, _, found = fit_head(lambda h: h @ weight.T + bias, weight, None, hidden, "M")
    assert found is not None
    torch.testing.assert_close(found, bias, rtol=1e-5, atol=1e-5)


def _squared(weight: torch.Tensor) -> Fn:
    return lambda h: (h @ weight.T) ** 2


def _normalised(weight: torch.Tensor) -> Fn:
    return lambda h: torch.nn.functional.normalize(h, dim=-1) @ weight.T


def _per_row_scale(weight: torch.Tensor) -> Fn:
    return lambda h: (h @ weight.T) * torch.linspace(0.5, 2, V)


def _slightly_uneven(weight: torch.Tensor) -> Fn:
    return lambda h: (h @ weight.T) * torch.linspace(0.9995, 1.0005, V)


def _other_matrix(weight: torch.Tensor) -> Fn:
    return lambda h: h @ weight.flip(0).T


def _clamped(weight: torch.Tensor) -> Fn:
    return lambda h: (h @ weight.T).clamp(-5, 5)


@pytest.mark.parametrize(
    "head",
    [_squared, _normalised, _per_row_scale, _slightly_uneven, _other_matrix, _clamped],
    ids=lambda f: f.__name__,
)
def test_what_the_form_does_not_explain_is_refused(
    weight: torch.Tensor, hidden: torch.Tensor, head: Callable[[torch.Tensor], Fn]
) -> None:
    with pytest.raises(ExportError, match=r"softcap\(scale \* \(W h \+ b\)\)"):
        fit_head(head(weight), weight, None, hidden, "M")


def test_tied_means_equal_values_whatever_the_flag_says(tiny_llama: Path) -> None:
    model = load_model(find_checkpoint(str(tiny_llama)))
    assert not probe_head(model).tied
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    head = probe_head(model)
    assert head.tied
    values = model.lm_head.weight.numel() * 4
    assert parameter_bytes(model, head) == sum(p.numel() * 4 for p in model.parameters()) - values
    model.config.tie_word_embeddings = True
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1e-3
    assert not probe_head(model).tied


def test_the_probe_sees_what_config_does_not_say(tiny_llama: Path) -> None:
    model = load_model(find_checkpoint(str(tiny_llama)))
    inner = model.lm_head.forward
    bias = torch.linspace(-1, 1, model.config.vocab_size)
    model.lm_head.forward = lambda h: 0.25 * inner(h) + bias
    head = probe_head(model)
    assert head.scale == 0.25
    assert head.bias is not None
    torch.testing.assert_close(head.bias * 0.25, bias, rtol=1e-4, atol=1e-4)


def test_a_head_that_is_not_one_matrix_is_refused(tiny_llama: Path) -> None:
    model = load_model(find_checkpoint(str(tiny_llama)))
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 257))
    with pytest.raises(ExportError, match="one output matrix was expected, found Sequential"):
        probe_head(model)
