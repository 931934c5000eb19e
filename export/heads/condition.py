"""A condition that hidden states are told: the module to train, its file, its way into a bundle."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from headport.condition import BIAS, CONDITION_FILE, FIXED, WEIGHT, read_conditions
from headport.errors import BundleError, CheckpointError, UsageError

__all__ = ["ConditionProjection", "save_condition", "write_condition"]


class ConditionProjection(nn.Module):
    """What is added to a model's hidden states, before its head: conditions [..., C] → [..., H].

    Train it with the model: `logits = lm_head(hidden_states + projection(condition)[:, None])`.

    Args:
        condition_size: C.
        hidden_size: H, the model's.
    """

    def __init__(self, condition_size: int, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(condition_size, hidden_size)

    def forward(self, condition: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(condition)
        return found


def save_condition(
    module: ConditionProjection,
    path: str | Path,
    fixed: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Save a projection for `headport export --condition PATH`.

    Args:
        module: The trained projection.
        path: A `.safetensors` file.
        fixed: Conditions that are asked for by name, [C] each.

    Raises:
        UsageError: If a fixed condition has no name, or another number of values.
    """
    size = module.linear.in_features
    for name, values in (fixed or {}).items():
        if not name or tuple(values.shape) != (size,):
            raise UsageError(
                f"fixed condition {name!r}: a name and {size} values were expected, found "
                f"{list(values.shape)}"
            )
    named = {f"{FIXED}{name}": values for name, values in (fixed or {}).items()}
    tensors = {WEIGHT: module.linear.weight, BIAS: module.linear.bias, **named}
    save_file({n: t.detach().float().contiguous() for n, t in tensors.items()}, path)


def write_condition(file: Path | None, folder: Path, hidden_size: int) -> None:
    """Copy a projection into a bundle in the making, once it is known to fit.

    Args:
        file: As `save_condition` writes it; None: nothing to do.
        folder: The bundle's.
        hidden_size: H, the model's.

    Raises:
        CheckpointError: If it cannot be read or is for another model.
    """
    if file is None:
        return
    try:
        read_conditions(file, hidden_size)
    except BundleError as error:
        raise CheckpointError(f"--condition: {error}") from error
    shutil.copyfile(file, folder / CONDITION_FILE)
