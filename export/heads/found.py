"""The value head that a checkpoint of a language model holds beside the model (`v_head.*`)."""

from __future__ import annotations

import torch
from safetensors import safe_open

from headport.errors import CheckpointError
from headport.export.checkpoint import VALUE_HEAD_PREFIX, Checkpoint
from headport.export.heads.files import read_tensors, value_head_from_tensors
from headport.export.heads.modules import ValueHead

__all__ = ["value_head_in"]


def value_head_in(checkpoint: Checkpoint) -> ValueHead | None:
    """The value head among a checkpoint's weights, as TRL saves it; None where there is none.

    Raises:
        CheckpointError: If there are such tensors, but in a layout that is not known.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in checkpoint.weight_files:
        if checkpoint.format == "safetensors":
            with safe_open(file, "pt") as stream:
                names = [n for n in stream.keys() if n.startswith(VALUE_HEAD_PREFIX)]  # noqa: SIM118
                tensors |= {name: stream.get_tensor(name).float() for name in names}
        elif checkpoint.format == "pickle":
            read, _ = read_tensors(file, allow_pickle=True)  # it was allowed to find the checkpoint
            tensors |= {n: t for n, t in read.items() if n.startswith(VALUE_HEAD_PREFIX)}
    try:
        return value_head_from_tensors(tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.name}: {error}") from error
