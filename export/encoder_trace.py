"""From an encoder with a head over the vocabulary to two graphs.

    encoder          source_ids, source_mask → hidden_states
    head.mlm.states  hidden_states → states, what the head's matrix is given

The second is whatever the model computes between the two (a dense layer, an activation and a norm,
as a rule). It is apart so that it runs at the positions that are asked about only, and so that
other heads get the encoder's own states.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from transformers.modeling_outputs import BaseModelOutput

from headport.cache_ports import SOURCE_IDS, SOURCE_MASK
from headport.errors import ExportError
from headport.export.attention import one_attention
from headport.export.checkpoint import run_reference
from headport.export.encoder_decoder.attention import EncoderAttention, any_mask
from headport.export.hygiene import finish_graph
from headport.export.source_function import SOURCE_ATTENTION
from headport.export.trace import run_export, settle, trace_errors
from headport.export.translate import translate

__all__ = ["needs_states", "trace_states", "trace_whole_encoder"]

# Sizes of the traced example: all different, none 1, so that no two dimensions are taken for one.
_BATCH, _TOKENS, _ROWS = 2, 5, 3
_SOURCE = ("source_batch", "source")
_HIDDEN, _STATES = "hidden_states", "states"


class _Encoder(torch.nn.Module):
    """The part of the model that the head sits on."""

    def __init__(self, model: Any, attention: EncoderAttention) -> None:
        super().__init__()
        self.model = model
        self._attention = attention

    def forward(self, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self._attention.mask = mask
        found = self.model.base_model(input_ids=source, attention_mask=mask)
        states: torch.Tensor = found.last_hidden_state
        return states


def trace_whole_encoder(model: Any, max_context: int) -> ir.Model:
    """Export an encoder: source_ids, source_mask [batch, tokens] → hidden_states [.., .., H].

    Args:
        model: The model.
        max_context: Tokens it can read; its tables of positions end there.

    Raises:
        ExportError: If the model cannot be traced faithfully.
    """
    ids = torch.ones((_BATCH, _TOKENS), dtype=torch.int64)
    batch, tokens = _SOURCE
    place = {0: torch.export.Dim(batch), 1: torch.export.Dim(tokens, max=max_context)}
    attention = EncoderAttention()
    with trace_errors(model):
        with one_attention(model, attention, any_mask):
            module = _Encoder(model, attention)
            program = run_export(module, (ids, torch.ones_like(ids)), (place, place))
        exported = translate(program, [SOURCE_IDS, SOURCE_MASK], [_HIDDEN])
    graph = settle(exported, model)
    finish_graph(graph, {}, "encoder", dict.fromkeys((SOURCE_IDS, SOURCE_MASK, _HIDDEN), _SOURCE))
    _check_layers(graph, model, attention.layers)
    return graph


def _check_layers(graph: ir.Model, model: Any, called: int) -> None:
    expected = getattr(model.config, "num_hidden_layers", called)
    found = sum(node.op_type.startswith(SOURCE_ATTENTION) for node in graph.graph)
    if not found == called == expected:
        raise ExportError(
            f"{type(model).__name__}: {expected} attention layers expected in the graph, {found} "
            "found; this architecture is not supported yet"
        )


class _States(torch.nn.Module):
    """What the head's matrix is given, as a function of the encoder's hidden states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        with _given_states(self.model, hidden_states[None]) as seen:
            self.model(input_ids=torch.zeros((1, 1), dtype=torch.int64))
        _check_once(self.model, seen)
        return seen[0][0]


@contextmanager
def _given_states(model: Any, states: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    # The encoder gives these states whatever it is asked; yields what reaches the head's matrix.
    seen: list[torch.Tensor] = []
    encoder = model.base_model
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _module, inputs: seen.append(inputs[0])
    )
    encoder.forward = lambda *_args, **_kwargs: BaseModelOutput(last_hidden_state=states)
    try:
        yield seen
    finally:
        del encoder.forward
        hook.remove()


def _check_once(model: Any, seen: list[torch.Tensor]) -> None:
    if len(seen) != 1 or seen[0].dim() != 3:
        raise ExportError(
            f"{type(model).__name__}: its head was expected to run once on all positions, it ran "
            f"{len(seen)} times"
        )


def needs_states(model: Any, hidden_size: int) -> bool:
    """Whether the model computes anything between hidden states and its head's matrix."""
    generator = torch.Generator().manual_seed(2)
    given = torch.randn((1, _ROWS, hidden_size), generator=generator)
    with _given_states(model, given) as seen:
        run_reference(model, input_ids=torch.zeros((1, 1), dtype=torch.int64))
    _check_once(model, seen)
    return not torch.equal(seen[0], given)


def trace_states(model: Any, hidden_size: int, name: str) -> ir.Model:
    """Export what lies between: hidden_states [rows, H] → states [rows, F].

    Raises:
        ExportError: If it cannot be traced faithfully.
    """
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    given = torch.zeros((_ROWS, hidden_size), dtype=dtype)
    with trace_errors(model):
        program = run_export(_States(model), (given,), ({0: torch.export.Dim("rows")},))
        exported = translate(program, [_HIDDEN], [_STATES])
    graph = settle(exported, model)
    finish_graph(graph, {}, name, dict.fromkeys((_HIDDEN, _STATES), ("rows",)))
    return graph
