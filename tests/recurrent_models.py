"""Tiny models whose layers keep states: one per recurrence, alone and beside attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from headport.bundle import Bundle
from headport.export.command import Options, export
from tests.conftest import VOCAB_SIZE, save_model

BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
ATTENTION: dict[str, Any] = {
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
}
# name → configuration class, settings
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "Lfm2Config",
        BASE | ATTENTION | {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    ),
    "mamba": ("MambaConfig", BASE | {"num_hidden_layers": 2, "state_size": 8}),
    "mamba2": (
        "Mamba2Config",
        BASE
        | {
            "num_hidden_layers": 1,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "time_step_limit": (0.3, 1.0),
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        BASE
        | {
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "lru_width": 32,
            "attention_window_size": 8,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        BASE
        | ATTENTION
        | {
            "num_hidden_layers": 2,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
        },
    ),
}
_made: dict[str, tuple[Path, Bundle]] = {}


def save_recurrent(name: str, folder: Path, **changes: Any) -> Path:
    """A random checkpoint of the family."""
    kind, settings = RECURRENT[name]
    return save_model(folder / name, getattr(transformers, kind)(**(settings | changes)))


def recurrent_bundle(name: str, factory: pytest.TempPathFactory) -> tuple[Path, Bundle]:
    """The family's checkpoint and the fp32 bundle exported from it, made once per process."""
    if name not in _made:
        folder = factory.mktemp("recurrent")
        checkpoint = save_recurrent(name, folder)
        _made[name] = checkpoint, export(Options(model=str(checkpoint), output=folder / "bundle"))
    return _made[name]
