"""Loading a model whose weights stay in the checkpoint's safetensors files.

transformers builds the model and finds each weight's place, as ever; instead of slices of opened
files it is handed deferred tensors. So sharding, missing prefixes, tied weights and converted keys
are its business on both roads, and a checkpoint that needs more falls back to the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headport.errors import CheckpointError
from headport.export.checkpoint import (
    VALUE_HEAD_PREFIX,
    Checkpoint,
    ModelKind,
    check_finite,
    load_model,
    load_pretrained,
    some_names,
)
from headport.export.deferred import (
    DeferredTensor,
    blocks,
    recording,
    stored_parts,
)
from headport.export.shards import StoredTensor, read_header

__all__ = ["Road", "load_streamed"]


@dataclass(frozen=True)
class Road:
    """How a model's weights are held while it is exported."""

    name: str  # `streamed`: read from the shards where they are used; `loaded`: held as a whole
    reason: str = ""  # why not streamed
    unused: tuple[str, ...] = ()  # tensors of the checkpoint that the model does not use


def load_streamed(
    checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, kind: ModelKind = "causal"
) -> tuple[Any, Road]:
    """Load a model whose weights stay in the checkpoint's safetensors files, where that works.

    Returns:
        The model as `load_model` gives it, its parameters `DeferredTensor`s; and the road taken.

    Raises:
        CheckpointError: As `load_model`.
    """
    reason = _why_not_streamed(checkpoint)
    if reason:
        return load_model(checkpoint, dtype, kind), Road("loaded", reason)
    with _files_left_closed() as parts, recording() as refusals:
        try:
            model = load_pretrained(checkpoint, dtype, kind)
        except CheckpointError:
            if not refusals:
                raise
    if refusals:
        return load_model(checkpoint, dtype, kind), Road("loaded", refusals[0])
    unused = _settle(checkpoint, model, parts)
    check_finite(checkpoint, model, blocks)
    return model.eval(), Road("streamed", unused=unused)


def _why_not_streamed(checkpoint: Checkpoint) -> str:
    if checkpoint.format != "safetensors":
        return f"weights in {checkpoint.format} form are read as a whole"
    config = json.loads((checkpoint.folder / "config.json").read_text("utf-8"))
    if config.get("quantization_config"):
        return "a quantised checkpoint is unpacked as a whole"
    return ""


@contextmanager
def _files_left_closed() -> Iterator[dict[str, StoredTensor]]:
    # transformers opens every shard and takes slices; it gets deferred tensors instead. Yields all
    # tensors of the files it opened.
    from transformers import modeling_utils

    found: dict[str, StoredTensor] = {}

    class Shard:
        def __init__(self, file: str, **_settings: Any) -> None:
            self._parts = read_header(Path(file))
            found.update(self._parts)

        def keys(self) -> list[str]:
            return list(self._parts)

        def get_slice(self, name: str) -> DeferredTensor:
            return DeferredTensor.stored(self._parts[name])

        def __exit__(self, *_error: object) -> None:
            pass

    genuine = modeling_utils.safe_open
    modeling_utils.safe_open = Shard
    try:
        yield found
    finally:
        modeling_utils.safe_open = genuine


def _settle(
    checkpoint: Checkpoint, model: torch.nn.Module, parts: dict[str, StoredTensor]
) -> tuple[str, ...]:
    # Buffers are small and used everywhere: read. Gives the tensors that nothing was made from.
    used = set()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for _, tensor in tensors:
        used |= {part.name for part in stored_parts(tensor)}
    homeless = [n for n, p in model.named_parameters() if not isinstance(p, DeferredTensor)]
    if homeless:
        raise CheckpointError(
            f"{checkpoint.name}: weights the model needs but the checkpoint lacks: "
            f"{', '.join(some_names(homeless))}"
        )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DeferredTensor):
                module._buffers[name] = buffer.evaluate()
    # A tied weight that is stored twice was compared with its twin.
    twins = set(getattr(model, "all_tied_weights_keys", {}))
    beside = {name for name in parts if name.startswith(VALUE_HEAD_PREFIX)}
    return tuple(sorted(parts.keys() - used - twins - beside))
