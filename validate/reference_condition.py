"""A condition told to the PyTorch model; part of the reference's process.

    logits = head(hidden state + W c + b)

with W and b from the file that was trained, not from the bundle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from headport.errors import CheckpointError

__all__ = ["tell_condition"]


def tell_condition(model: Any, projection: Path, condition: str) -> None:
    """Let every hidden state get what a condition adds, before the head, from now on.

    Args:
        model: A causal language model.
        projection: As `headport.export.heads.save_condition` writes it.
        condition: Name of a fixed condition in it, or a .npy file of values [C].

    Raises:
        CheckpointError: If the file, the name or the values are not usable.
    """
    tensors = _read(projection)
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if weight is None or bias is None or weight.dim() != 2 or bias.shape != weight.shape[:1]:
        raise CheckpointError(
            f"{projection}: weight [hidden size, condition size] and bias [hidden size] were "
            "expected; pass the file that `headport export --condition` was given"
        )
    values = _values(tensors, projection, condition)
    if values.shape != weight.shape[1:]:
        raise CheckpointError(
            f"--condition {condition}: {weight.shape[1]} values were expected, found "
            f"{list(values.shape)}"
        )
    head = model.get_output_embeddings()
    size = getattr(head, "in_features", None)
    if size != len(weight):
        raise CheckpointError(
            f"{projection}: it is for hidden states of {len(weight)} values, the head of "
            f"{type(model).__name__} reads {size}"
        )
    added = torch.nn.functional.linear(values, weight, bias)
    head.register_forward_pre_hook(lambda _, given: (given[0] + added, *given[1:]))


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        return {name: tensor.float() for name, tensor in load_file(file).items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: a projection was expected: {error}") from error


def _values(tensors: dict[str, torch.Tensor], projection: Path, condition: str) -> torch.Tensor:
    if condition.endswith(".npy"):
        try:
            return torch.from_numpy(np.load(condition, allow_pickle=False).astype(np.float32))
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise CheckpointError(f"--condition {condition}: no plain array: {error}") from error
    known = {n.removeprefix("fixed."): t for n, t in tensors.items() if n.startswith("fixed.")}
    if condition not in known:
        raise CheckpointError(
            f"{projection}: no fixed condition {condition!r} in it (known are "
            f"{', '.join(known) or 'none'}); name one, or pass a .npy file of values"
        )
    return known[condition]
