"""The heads of a bundle beside its model's own: found or read, checked, made fit to be written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headport.errors import ExportError, UsageError
from headport.export.checkpoint import Checkpoint
from headport.export.heads.adaptive import export_adaptive
from headport.export.heads.exported import ExportedHead
from headport.export.heads.files import load_head
from headport.export.heads.found import value_head_in
from headport.export.heads.modules import MultiTaskHead, TreeSoftmax, ValueHead, VocabularyHead
from headport.export.heads.request import HeadRequest
from headport.export.heads.tasks import export_tasks
from headport.export.heads.tree import export_tree
from headport.export.heads.value import export_value
from headport.export.heads.vocabulary import export_vocabulary

__all__ = ["GivenHead", "export_heads", "given_heads"]

_FOUND_NAME = "value"


@dataclass(frozen=True)
class GivenHead:
    """A head's module and where it comes from, in words."""

    name: str
    module: nn.Module
    meaning: str


def given_heads(checkpoint: Checkpoint, requests: Sequence[HeadRequest]) -> list[GivenHead]:
    """Load every head that is asked for, and the one that the checkpoint holds in any case.

    Pickled files are read where the checkpoint itself may be one.

    Raises:
        CheckpointError: If a file cannot be read as a head.
        UsageError: If `auto` names a head that the checkpoint does not hold.
    """
    found = value_head_in(checkpoint)
    heads = [
        GivenHead(
            request.name,
            load_head(request.file, allow_pickle=checkpoint.allow_pickle),
            f"from the file {request.file.name}",
        )
        for request in requests
        if request.file is not None
    ]
    auto = next((request.name for request in requests if request.file is None), None)
    if found is None:
        if auto is None:
            return heads
        raise UsageError(
            f"--head {auto}=auto: {checkpoint.name} holds no head beside its own "
            "(v_head.* tensors were looked for); name a file"
        )
    meaning = "the checkpoint's v_head, a scalar per position"
    return [GivenHead(auto or _FOUND_NAME, found, meaning), *heads]


_Export = Callable[[str, Any, torch.dtype, str], ExportedHead]
_KINDS: dict[type[nn.Module], _Export] = {
    ValueHead: export_value,
    MultiTaskHead: export_tasks,
    VocabularyHead: export_vocabulary,
    nn.AdaptiveLogSoftmaxWithLoss: export_adaptive,
    TreeSoftmax: export_tree,
}


def export_heads(
    given: Sequence[GivenHead], *, hidden_size: int, rows: int, tokens: int, dtype: torch.dtype
) -> list[ExportedHead]:
    """Check that heads fit their model, and make them ready to be written.

    Args:
        given: The heads.
        hidden_size: H of the model.
        rows: Rows of its embedding.
        tokens: Size of its vocabulary; rows above it are padding.
        dtype: Precision of the bundle.

    Raises:
        ExportError: If a head reads another number of values than the model gives, is over another
            vocabulary, names a padding token that there is not, or holds a weight that is not
            finite.
    """
    found = []
    for head in given:
        _check_fit(head, hidden_size, rows, tokens)
        found.append(_KINDS[type(head.module)](head.name, head.module, dtype, head.meaning))
    return found


def _check_fit(head: GivenHead, hidden_size: int, rows: int, tokens: int) -> None:
    first = next(m for m in head.module.modules() if isinstance(m, nn.Linear))
    if first.in_features != hidden_size:
        raise ExportError(
            f"head {head.name} ({head.meaning}) reads hidden states of {first.in_features} "
            f"values, the model gives {hidden_size}; it was trained for another model"
        )
    size = _vocabulary(head.module)
    if size is not None and not tokens <= size <= rows:
        expected = str(rows) if tokens == rows else f"{tokens} to {rows}"
        raise ExportError(
            f"head {head.name} ({head.meaning}) gives {size} tokens, the model's vocabulary has "
            f"{expected}; it was trained for another one"
        )
    pad_id = getattr(head.module, "config", {}).get("pad_id")
    if pad_id is not None and not (isinstance(pad_id, int) and 0 <= pad_id < rows):
        raise ExportError(
            f"head {head.name}: its padding token {pad_id!r} is none of the model's {rows} tokens"
        )


def _vocabulary(module: nn.Module) -> int | None:
    match module:
        case VocabularyHead():
            return module.output.out_features
        case TreeSoftmax():
            return module.members.out_features
        case nn.AdaptiveLogSoftmaxWithLoss():
            return module.n_classes
    return None
