"""Adapter rows: what they replace, what they compute, and that they leave the model as it was."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from benchmarks.zoo import ZOO
from headport.errors import ExportError
from headport.export.adapters import (
    ADAPTERS,
    REFUSED,
    adapted,
    cached_sizes,
    check_family,
    expanded_layers,
    halving_slopes,
    mpt_slopes,
)
from headport.export.attention import MaskSpec
from headport.export.expert_adapters import phimoe_router
from headport.export.latent_adapters import (
    deepseek_v2_attention,
    deepseek_v2_rotary,
    expand_latents,
)

HEADS = (1, 2, 4, 6, 8, 12, 16, 25, 32, 71, 112)


def build(name: str) -> Any:
    family = next(f for f in ZOO if f.name == name)
    config = getattr(transformers, family.config)(**family.settings)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_are_the_models_own(heads: int) -> None:
    # Two neighbouring positions differ by one slope.
    bloom = build_alibi_tensor(torch.ones(1, 3), heads, torch.float32)[:, 0]
    torch.testing.assert_close(halving_slopes(heads), bloom[:, 2] - bloom[:, 1])
    mpt = build_mpt_alibi_tensor(heads, 3)[:, 0]
    torch.testing.assert_close(mpt_slopes(heads), mpt[:, 2] - mpt[:, 1])


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_row_names_a_class_that_exists(name: str) -> None:
    module, _, kind = name.rpartition(".")
    replaced = getattr(importlib.import_module(module), kind)
    assert callable(getattr(replaced, ADAPTERS[name].method))


def test_every_refused_family_exists() -> None:
    known = {
        name
        for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for name in ((names,) if isinstance(names, str) else names)
    }
    assert not set(REFUSED) - known


@pytest.mark.parametrize("name", ["bloom", "falcon-grouped", "openai-gpt", "deepseek-v3"])
def test_a_model_is_as_it_was_afterwards(name: str) -> None:
    model = build(name)
    before = [dict(module.__dict__) for module in model.modules()]
    with adapted(model):
        assert [dict(module.__dict__) for module in model.modules()] != before
    for module, kept in zip(model.modules(), before, strict=True):
        assert module.__dict__.keys() == kept.keys()


def test_caches_that_differ_from_the_models_own() -> None:
    assert cached_sizes(build("falcon-grouped")) == {0: (2, 16, 16), 1: (2, 16, 16)}
    assert cached_sizes(build("openai-gpt")) == {0: (4, 16, 16), 1: (4, 16, 16)}
    latent = build("deepseek-v3")
    assert cached_sizes(latent) == {0: (4, 24, 16), 1: (4, 24, 16)}
    assert expanded_layers(latent) == {0, 1}
    llama = build("llama")
    assert (cached_sizes(llama), expanded_layers(llama)) == ({}, frozenset())


def test_a_refusal_says_which_family_and_why() -> None:
    config = transformers.XLNetConfig(vocab_size=9, d_model=8, n_layer=1, n_head=2, d_inner=8)
    with pytest.raises(ExportError, match="XLNetLMHeadModel is refused: its attention is relative"):
        check_family(transformers.XLNetLMHeadModel(config))


def test_latents_are_expanded_as_the_module_does_it() -> None:
    module = build("deepseek-v3").model.layers[0].self_attn
    latent, turned = torch.randn(2, 1, 5, 24), torch.randn(2, 1, 5, 8)
    expected = module.expand_kv(latent, turned)
    for found, wanted in zip(expand_latents(module, latent, turned), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_rotary_part_of_deepseek_v2_needs_no_complex_numbers() -> None:
    model = build("deepseek-v2").model
    attention, positions = model.layers[0].self_attn, torch.tensor([[0, 1, 5, 40]])
    hidden = torch.randn(1, 4, 64)
    turns = deepseek_v2_rotary(model.rotary_emb, hidden, positions)
    as_complex = model.rotary_emb(hidden, positions)
    torch.testing.assert_close(torch.view_as_complex(turns), as_complex)
    taken: dict[str, torch.Tensor] = {}

    class Cache:
        def update(self, key: Any, value: Any, layer: int, **_more: Any) -> Any:
            taken[f"{len(taken)}"] = value
            return key, value

    attention(hidden, None, Cache(), as_complex)
    with pytest.raises(ExportError, match="without a KV cache"):  # attention itself is no trace
        deepseek_v2_attention(attention, hidden, MaskSpec(0), Cache(), turns)
    torch.testing.assert_close(taken["1"], taken["0"])


def test_the_sparse_mixer_is_the_modules_own() -> None:
    router = build("phimoe").model.layers[0].mlp.router
    torch.nn.init.normal_(router.weight, std=0.02)  # scores near each other, so that jitter tells
    hidden = torch.randn(64, 64)
    for found, wanted in zip(phimoe_router(router, hidden), router(hidden), strict=True):
        torch.testing.assert_close(found, wanted)
    assert (phimoe_router(router, hidden)[1] < 1).any()
