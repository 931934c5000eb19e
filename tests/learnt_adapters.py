"""Adapters of learnt tokens, written as PEFT writes them, without PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["write_learnt"]


def write_learnt(folder: Path, kind: str, saved: torch.Tensor, **config: Any) -> Path:
    """An adapter whose `prompt_embeddings` are `saved`, [P, size]."""
    folder.mkdir()
    settings = {
        "peft_type": kind,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere/base",
        "num_virtual_tokens": len(saved),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    save_file({"prompt_embeddings": saved.contiguous()}, folder / "adapter_model.safetensors")
    return folder
