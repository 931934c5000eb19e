"""What the one attention function accepts from a model, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils

from headport.errors import ExportError
from headport.export.attention import MaskSpec, TracedCache, attend, one_attention
from headport.export.attention import causal_mask as mask

B, KV, T, P, D = 1, 2, 3, 5, 8
causal = masking_utils.causal_mask_function


def window_of(function: Any, **arguments: Any) -> int:
    return mask(mask_function=function, **arguments).window


def test_the_window_is_read_off_the_mask_function_itself() -> None:
    assert window_of(causal) == 0
    assert window_of(masking_utils.sliding_window_causal_mask_function(8)) == 8
    # The hint alone says nothing: a chunked mask passes the same one.
    assert window_of(causal, local_size=8) == 0


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.bidirectional_mask_function,
        masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)),
        masking_utils.sliding_window_causal_mask_function(0),
        masking_utils.or_masks(causal, masking_utils.bidirectional_mask_function),
    ],
    ids=["bidirectional", "chunked", "no-window", "or"],
)
def test_other_masks_are_refused_where_they_are_used(function: Any) -> None:
    made = mask(mask_function=function)
    with pytest.raises(ExportError, match="causal mask"):
        _ = made.window


def test_custom_mask_functions_are_refused() -> None:
    with pytest.raises(ExportError, match="custom mask function"):
        _ = mask(mask_function=causal, use_vmap=True).window


@pytest.mark.parametrize("use", [lambda x, m: x + m, lambda x, m: x.masked_fill(m, 0.0), torch.add])
def test_the_marker_is_no_tensor(use: Any) -> None:
    with pytest.raises(ExportError, match="attention interface"):
        use(torch.zeros(2), MaskSpec(0))


@pytest.fixture
def cache() -> TracedCache:
    past = [torch.zeros((B, KV, P, D))]
    return TracedCache(past, past, torch.ones((B, P + T), dtype=torch.int64))


def call(cache: TracedCache | None, key: Any, value: Any, **changes: Any) -> None:
    class Module(torch.nn.Module):
        pass

    class Model(torch.nn.Module):  # no submodule has a configuration to switch
        pass

    query = torch.zeros((B, 2 * KV, T, D))
    arguments: dict[str, Any] = {"attention_mask": MaskSpec(0)} | changes
    with one_attention(Model()) as active:  # type: ignore[arg-type]
        active.set(cache)
        attend(Module(), query, key, value, arguments.pop("attention_mask"), **arguments)


def updated(cache: TracedCache) -> tuple[torch.Tensor, torch.Tensor]:
    new = torch.zeros((B, KV, T, D))
    return cache.update(new, new.clone(), 0)


def test_keys_as_the_cache_gave_them_are_accepted(cache: TracedCache) -> None:
    key, value = updated(cache)
    assert key.shape == (B, KV, P + T, D)
    call(cache, key, value)
    assert cache.present[0][0].shape == (B, KV, P + T, D)


def test_arguments_that_change_nothing_are_accepted(cache: TracedCache) -> None:
    call(cache, *updated(cache), dropout=0.0, use_cache=True, position_bias=None, other=False)
    assert list(cache.present) == [0]


def test_keys_changed_after_the_cache_are_refused(cache: TracedCache) -> None:
    key, value = updated(cache)
    with pytest.raises(ExportError, match="change after they enter"):
        call(cache, key * 1, value)


def test_attention_without_a_cache_is_refused(cache: TracedCache) -> None:
    key = torch.zeros((B, KV, T, D))
    with pytest.raises(ExportError, match="without a KV cache"):
        call(cache, key, key)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_causal": False}, "not causal"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"never_heard_of": 3}, "never_heard_of"),
        ({"attention_mask": torch.zeros(1)}, "mask interface"),
    ],
)
def test_what_the_operator_cannot_express_is_refused(
    cache: TracedCache, changes: dict[str, Any], reason: str
) -> None:
    key, value = updated(cache)
    with pytest.raises(ExportError, match=reason):
        call(cache, key, value, **changes)


def test_a_layer_is_reached_once(cache: TracedCache) -> None:
    call(cache, *updated(cache))
    with pytest.raises(ExportError, match="layer 0 was reached twice"):
        updated(cache)
