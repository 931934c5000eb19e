"""Rows of embeddings in the place of tokens: traced beside the lookup.

    x = Where(embedding_rows < 0, lookup(input_ids), embeddings[embedding_rows])

stands where the model's own embedding module answers, so whatever the module does to its rows, such
as Gemma's scaling, is done to tokens alone, as with transformers' `inputs_embeds`; whatever the
model does afterwards is done to both.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch

from headport.errors import ExportError
from headport.export.checkpoint import Checkpoint, ModelKind
from headport.given_rows import EMBEDDING_ROWS, EMBEDDINGS

__all__ = ["ARGUMENT", "beside_tokens", "check_embeddable", "check_embedded", "check_takes_rows"]

ARGUMENT = "inputs_embeds"  # of a transformers model


def check_embeddable(checkpoint: Checkpoint, kind: ModelKind) -> None:
    """Refuse models whose prompts are nothing but tokens.

    Raises:
        ExportError: If it is one of these.
    """
    if checkpoint.factory or kind != "causal":
        what = "one that your own function makes" if checkpoint.factory else f"a {kind} model"
        raise ExportError(
            "--inputs-embeds: rows of embeddings stand in prompts of causal language models that "
            f"transformers loads, this is {what}; leave the option out"
        )


def check_takes_rows(model: Any) -> None:
    """Refuse models that read tokens alone.

    Raises:
        ExportError: If it is one of these.
    """
    if ARGUMENT not in inspect.signature(model.forward).parameters:
        raise ExportError(
            f"--inputs-embeds: {type(model).__name__} takes no {ARGUMENT}, only token ids; leave "
            "the option out"
        )


@contextmanager
def beside_tokens(model: Any, rows: torch.Tensor, values: torch.Tensor) -> Iterator[None]:
    """Let the model's embedding module answer with given rows where there are such.

    Args:
        model: While it is traced.
        rows: int64 [B, T]; below 0 where the token is looked up.
        values: [given, E].
    """

    def choose(_module: Any, _args: Any, found: torch.Tensor) -> torch.Tensor:
        given = torch.nn.functional.embedding(rows.clamp(min=0), values)
        return torch.where((rows < 0)[..., None], found, given.to(found.dtype))

    hook = model.get_input_embeddings().register_forward_hook(choose)
    try:
        yield
    finally:
        hook.remove()


def check_embedded(backbone: ir.Model, name: str) -> None:
    """Refuse a backbone that reads token ids beside its embedding, or never reads given rows.

    Args:
        backbone: Traced with `beside_tokens`.
        name: Names the model in messages.

    Raises:
        ExportError: If it is one of these.
    """
    inputs = {value.name: value for value in backbone.graph.inputs}
    if not all(inputs[each].uses() for each in (EMBEDDINGS, EMBEDDING_ROWS)):
        raise ExportError(
            f"--inputs-embeds: {name} looks its tokens up by another module than the one that it "
            "names as its input embeddings; leave the option out"
        )
    lookups = 0
    for use in inputs["input_ids"].uses():
        lookups += use.node.op_type == "Gather"
        if use.node.op_type not in ("Gather", "Shape") and use.node.domain != "headport":
            raise ExportError(
                f"--inputs-embeds: {name} gives token ids to {use.node.op_type} too, not only to "
                "its embedding; leave the option out"
            )
    if lookups != 1:
        raise ExportError(
            f"--inputs-embeds: {name} looks token ids up in {lookups} tables, one was expected: "
            "rows that are given stand for one; leave the option out"
        )
