"""Tiny models of families whose head or attention is unlike Llama's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from tests.conftest import VOCAB_SIZE, save_model

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# family → config class, its settings, what the manifest's head must say
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "phi": ("PhiConfig", SMALL | {"tie_word_embeddings": False}, {"bias": True, "tied": False}),
    "granite": (
        "GraniteConfig",
        SMALL | {"logits_scaling": 16.0, "tie_word_embeddings": False},
        {"scale": 0.0625, "bias": False},
    ),
    "cohere": ("CohereConfig", SMALL | {"logit_scale": 0.0625}, {"scale": 0.0625, "tied": True}),
    "mistral": ("MistralConfig", SMALL | {"sliding_window": 8}, {"scale": 1.0, "tied": False}),
    "gpt2": ("GPT2Config", _GPT2, {"tied": True, "bias": False}),
}


def save_family(family: str, folder: Path) -> Path:
    """A random checkpoint of the family."""
    kind, settings, _ = FAMILIES[family]
    return save_model(folder / family, getattr(transformers, kind)(**settings))
