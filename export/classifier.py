"""Decoders that classify instead of predicting tokens: `…ForSequenceClassification`, `…ForToken…`.

Their last layer is one linear map of every hidden state. A text's scores are those at its last
token that is not padding. With one label they are a value, with more a task.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from headport.errors import ExportError
from headport.export.checkpoint import ModelKind, run_reference
from headport.export.deferred import in_memory
from headport.export.head import HeadTransform
from headport.export.head_parity import HeadReference
from headport.export.heads.attach import GivenHead
from headport.export.heads.modules import MultiTaskHead, ValueHead

__all__ = ["Classifier", "find_classifier", "find_layer", "reference_classifier"]

Int64 = npt.NDArray[np.int64]

_LAYERS = ("score", "classifier")
_TASK = "labels"


@dataclass(frozen=True)
class Classifier:
    """The last layer of a classifying decoder."""

    given: GivenHead
    transform: HeadTransform  # in the place of an LM head, for what asks a model for one
    pooled: bool
    pad_id: int | None


def find_classifier(model: Any, kind: ModelKind, name: str | None) -> Classifier:
    """Find a classifying decoder's last layer, and let the model end there when it is traced.

    Args:
        model: As loaded; from now on `get_output_embeddings()` gives that layer.
        kind: `sequence` or `token`.
        name: What to call the head; None: `value` for one label, else `labels`.

    Raises:
        ExportError: If there is no such layer, it holds a weight that is not finite, or the model's
            padding token does not exist.
    """
    layer, architecture = find_layer(model), type(model).__name__
    pooled, config = kind == "sequence", model.config.get_text_config()
    pad_id = config.pad_token_id if pooled else None
    rows = model.get_input_embeddings().weight.shape[0]
    if pad_id is not None and not 0 <= pad_id < rows:
        raise ExportError(
            f"{architecture}: its padding token {pad_id} is none of its {rows} tokens; correct "
            "pad_token_id in config.json"
        )
    labels = [str(model.config.id2label.get(n, n)) for n in range(layer.out_features)]
    with in_memory(layer):
        module = _module(layer, labels, pooled, pad_id)
    model.get_output_embeddings = lambda: layer
    names = {id(p): n for n, p in model.named_parameters()}
    transform = HeadTransform(
        weight=layer.weight.detach(),
        weight_name=names[id(layer.weight)],
        bias=None,
        scale=1.0,
        softcap=None,
        tied=False,
    )
    default = "value" if layer.out_features == 1 else _TASK
    meaning = f"{architecture}'s {', '.join(labels)}"
    return Classifier(GivenHead(name or default, module, meaning), transform, pooled, pad_id)


def find_layer(model: Any) -> nn.Linear:
    """The last layer of a classifying decoder.

    Raises:
        ExportError: If the model is none.
    """
    layer = next((m for n in _LAYERS if isinstance(m := getattr(model, n, None), nn.Linear)), None)
    takes_cache = {"cache", "past_key_values"} & set(inspect.signature(model.forward).parameters)
    if layer is None or not takes_cache:
        raise ExportError(
            f"{type(model).__name__}: a decoder whose last layer is one linear `score` or "
            "`classifier` was expected; of encoders, those that fill in masked tokens can be "
            "exported"
        )
    return layer


def _module(
    layer: nn.Linear, labels: list[str], pooled: bool, pad_id: int | None
) -> ValueHead | MultiTaskHead:
    biased, pooling = layer.bias is not None, "last" if pooled else "none"
    settings: dict[str, Any] = {"pooling": pooling, "pad_id": pad_id}
    if len(labels) == 1:
        value = ValueHead(layer.in_features, bias=biased, **settings)
        own = value.summary
        made: ValueHead | MultiTaskHead = value
    else:
        made = MultiTaskHead(layer.in_features, {_TASK: labels}, **settings)
        own = made.tasks[_TASK] = nn.Linear(layer.in_features, len(labels), bias=biased)
    with torch.no_grad():
        own.weight.copy_(layer.weight)
        if biased:
            own.bias.copy_(layer.bias)
    return made.eval()


@torch.no_grad()
def reference_classifier(
    model: Any, rows: Sequence[tuple[Int64, Int64]], classifier: Classifier
) -> HeadReference:
    """What the untouched model answers at every scored position.

    Args:
        model: The model.
        rows: Token ids [n] and scored positions of each.
        classifier: Its last layer.

    Raises:
        ExportError: If what it says about a text is not what it says about the text's last token.
    """
    answers = []
    value = isinstance(classifier.given.module, ValueHead)
    for ids, scored in rows:
        scores, pooled = _run(model, ids)
        if classifier.pooled:
            last = last_token(ids, classifier.pad_id)
            if not torch.equal(pooled[0], scores[last]):
                raise ExportError(
                    f"{type(model).__name__}: its answer about a text is not the one at its last "
                    "token that is not padding, as of transformers' decoders; it is refused"
                )
        kept = scores[torch.from_numpy(scored)].numpy()
        answers.append({"values": kept[:, 0]} if value else {_TASK: kept})
    return HeadReference(classifier.given.name, tuple(answers))


def last_token(ids: Int64, pad_id: int | None) -> int:
    """Place of a text's last token that is not padding."""
    if pad_id is None or (ids == pad_id).all():
        return len(ids) - 1 if pad_id is None else 0
    return int(np.flatnonzero(ids != pad_id)[-1])


def _run(model: Any, ids: Int64) -> tuple[torch.Tensor, torch.Tensor]:
    seen: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda _module, _inputs, output: seen.append(output)
    )
    try:
        found = run_reference(model, input_ids=torch.from_numpy(ids)[None], use_cache=False)
    finally:
        hook.remove()
    return seen[0][0].float(), found.logits.float()
