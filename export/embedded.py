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
from headport.export.functions import DOMAIN
from headport.given_rows import EMBEDDING_ROWS, EMBEDDINGS

__all__ = ["ARGUMENT", "beside_tokens", "check_embeddable", "check_embedded", "check_takes_rows"]

ARGUMENT = "inputs_embeds"  # of a transformers model
_SAME_IDS = ("Cast", "Reshape", "Squeeze", "Unsqueeze")


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
    readers = list(_readers(inputs["input_ids"]))
    odd = sorted({n.op_type for n in readers if n.op_type != "Gather"})
    if odd:
        raise ExportError(
            f"--inputs-embeds: {name} gives token ids to {', '.join(odd)} too, not only to its "
            "embedding; leave the option out"
        )
    if len(readers) != 1:
        raise ExportError(
            f"--inputs-embeds: {name} looks token ids up in {len(readers)} tables, one was "
            "expected: rows that are given stand for one; leave the option out"
        )


def _readers(ids: ir.Value) -> Iterator[ir.Node]:
    """What reads ids for their values; some only read how many there are."""
    for use in ids.uses():
        if use.node.op_type in _SAME_IDS:
            yield from _readers(use.node.outputs[0])
        elif use.node.op_type != "Shape" and use.node.domain != DOMAIN:
            yield use.node
