"""What a decoder's bundle is to answer: its own last layer, and the heads beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headport.errors import UsageError
from headport.export.checkpoint import Checkpoint, ModelKind
from headport.export.classifier import Classifier, find_classifier, reference_classifier
from headport.export.head import HeadTransform, probe_head
from headport.export.head_parity import HeadReference, reference_heads
from headport.export.heads.attach import export_heads, given_heads
from headport.export.heads.exported import ExportedHead
from headport.export.heads.request import HeadRequest
from headport.export.parity import ParityPlan, reference_logits

__all__ = ["Subject", "find_subject"]

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Subject:
    """The heads of a model, before they are written."""

    transform: HeadTransform  # of its own last layer
    classifier: Classifier | None  # None: the last layer is an LM head
    heads: tuple[ExportedHead, ...]  # all but an LM head

    def reference(self, model: Any, plan: ParityPlan) -> tuple[list[Float32], list[HeadReference]]:
        """What the untouched model answers: logits of its LM head, and what the others say.

        Raises:
            ExportError: If it does not answer as it is taken to.
        """
        rows = list(zip(plan.token_ids, plan.scored, strict=True))
        own = None if self.classifier is None else self.classifier.given.name
        beside = {head.name: head.reference for head in self.heads if head.name != own}
        others = reference_heads(model, rows, beside)
        if self.classifier is None:
            return reference_logits(model, plan), others
        return [], [reference_classifier(model, rows, self.classifier), *others]

    @contextmanager
    def traceable(self, model: Any) -> Iterator[None]:
        """Let the model be traced: some want a padding token to pool, which no trace does."""
        config = model.config.get_text_config()
        if self.classifier is None or not self.classifier.pooled or config.pad_token_id is not None:
            yield
            return
        config.pad_token_id = 0
        try:
            yield
        finally:
            config.pad_token_id = None


def find_subject(
    model: Any,
    kind: ModelKind,
    checkpoint: Checkpoint,
    requests: Sequence[HeadRequest],
    *,
    tokens: int,
    dtype: torch.dtype,
) -> Subject:
    """Find a model's own head and load those that are asked for.

    Args:
        model: As loaded.
        kind: What it is.
        checkpoint: Where it comes from.
        requests: Heads that are asked for.
        tokens: Size of the model's vocabulary; rows of its embedding above it are padding.
        dtype: Precision of the bundle.

    Raises:
        CheckpointError: If a head's file cannot be read.
        ExportError: If the model's own head is none that can be exported, or a head does not fit
            the model.
        UsageError: If the requests do not fit the checkpoint.
    """
    classifier = None
    if kind == "causal":
        given, transform = given_heads(checkpoint, requests), probe_head(model)
    else:
        auto = next((request.name for request in requests if request.file is None), None)
        classifier = find_classifier(model, kind, auto)
        transform = classifier.transform
        files = [request for request in requests if request.file is not None]
        given = [classifier.given, *given_heads(checkpoint, files)]
    names = [head.name for head in given]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            f"--head {twice[0]}: {checkpoint.name} holds a head that has that name; give that one "
            "another name, as in --head own=auto"
        )
    heads = export_heads(
        given,
        hidden_size=transform.weight.shape[1],
        rows=model.get_input_embeddings().weight.shape[0],
        tokens=tokens,
        dtype=dtype,
    )
    return Subject(transform, classifier, tuple(heads))
