"""What the manifest says about an encoder-decoder model beside what it says about any other."""

from __future__ import annotations

from typing import Any

import torch

from headport.errors import ExportError
from headport.export.encoder_decoder.families import Family
from headport.manifest import Source

__all__ = ["check_vocabularies", "source_entry", "target_context"]

_TARGET_KEYS = ("max_target_positions", "max_position_embeddings")
# Relative positions have no table that ends. What a config calls `n_positions` is the length that a
# model was trained on, which these models are used beyond.
_RELATIVE_CONTEXT = 2048  # tokens


def target_context(model: Any, family: Family) -> int:
    """Tokens that the decoder can hold, its start included.

    Raises:
        ExportError: If a model with a table of positions does not state it.
    """
    if family.positions == "relative":
        return _RELATIVE_CONTEXT
    for key in _TARGET_KEYS:
        value = getattr(model.config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ExportError(
        f"{type(model).__name__}: its config states no length of a reply "
        f"({', '.join(_TARGET_KEYS)} were looked for)"
    )


def source_entry(model: Any, family: Family, vocab_size: int) -> Source:
    """The manifest's `source` record.

    Raises:
        ExportError: If the encoder's table of positions does not reach as far as the config says.
    """
    if family.reads == "features":
        return Source(max_length=None, vocab_size=None)
    if family.positions == "relative":
        return Source(max_length=None, vocab_size=vocab_size)
    length = target_context(model, family)
    table = getattr(model.get_encoder(), "embed_positions", None)
    rows = table.weight.shape[0] - getattr(table, "offset", 0) if table is not None else 0
    if rows < length:
        raise ExportError(
            f"{type(model).__name__}: sources of {length} tokens are stated, but the encoder's "
            f"table of positions reaches {rows}"
        )
    return Source(max_length=length, vocab_size=vocab_size)


def check_vocabularies(model: Any, family: Family, head: torch.Tensor) -> None:
    """Refuse models that read tokens of one vocabulary and write tokens of another.

    Raises:
        ExportError: Naming both sizes.
    """
    if family.reads == "features":
        return
    read = model.get_encoder().get_input_embeddings().weight.shape[0]
    if read != head.shape[0]:
        raise ExportError(
            f"{type(model).__name__}: it reads a vocabulary of {read} tokens and writes one of "
            f"{head.shape[0]}; a bundle has one tokenizer.json for both, so models with separate "
            "vocabularies are not supported; train or convert it with a shared one"
        )
