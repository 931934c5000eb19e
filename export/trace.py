"""From a PyTorch model to the portable backbone: token ids → hidden states, with a cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch._subclasses import fake_tensor

from headport.errors import ExportError
from headport.export.adapters import adapted, cached_sizes, check_family, expanded_layers
from headport.export.attention import one_attention
from headport.export.checkpoint import first_line, quiet_libraries, run_reference
from headport.export.deferred import NotDeferrableError
from headport.export.embedded import beside_tokens, check_embedded
from headport.export.experts import one_op_per_layer
from headport.export.functions import DOMAIN, POSITIONS
from headport.export.hygiene import check_attention, finish_graph, store_transposed
from headport.export.onnx_weights import bind_weights, fake_weights
from headport.export.recurrent import one_recurrence
from headport.export.recurrent_cache import RecurrentCache
from headport.export.recurrent_gemma import module_states, states_in_modules
from headport.export.states import StateShape, layer_states
from headport.export.translate import optimize_graph, translate
from headport.given_rows import EMBEDDING_ROWS, EMBEDDINGS

__all__ = [
    "CacheShape",
    "cache_shapes",
    "run_export",
    "settle",
    "trace_backbone",
    "trace_errors",
]

# What tracing raises where model code asks for a value of a fake weight.
_NEED_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)
# Sizes of the traced example: all different, none 1, so that no two dimensions are taken for one.
_BATCH, _SEQUENCE, _PAST, _GIVEN = 2, 3, 5, 7


@dataclass(frozen=True)
class CacheShape:
    """The fixed dimensions of one layer's cache: key [B, heads, P, key_size], value likewise."""

    heads: int
    key_size: int
    value_size: int
    layer: int = 0  # of the model; a hybrid's other layers have none


def cache_shapes(model: Any) -> tuple[CacheShape | StateShape, ...]:
    """What each layer keeps, read off a cache that the model itself has filled.

    Raises:
        ExportError: If a layer keeps something other than the keys and values of its tokens, and
            states of a fixed size.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DummyLayer

    check_family(model)
    sizes = cached_sizes(model)
    if sizes and _cache_argument(model) is None:
        return tuple(CacheShape(*size, layer) for layer, size in sorted(sizes.items()))
    cache, tokens = DynamicCache(config=model.config), 2
    ids = torch.zeros((1, tokens), dtype=torch.int64)
    run_reference(model, input_ids=ids, **_cache_arguments(model, cache))
    shapes: list[CacheShape | StateShape] = []
    own_states = module_states(model)
    for index, layer in enumerate(cache.layers):
        states = [*layer_states(layer, index), *own_states.get(index, ())]
        shapes += states
        key, value = getattr(layer, "keys", None), getattr(layer, "values", None)
        if key is None and (states or isinstance(layer, DummyLayer)):
            continue
        if not isinstance(key, torch.Tensor) or not isinstance(value, torch.Tensor):
            raise ExportError(
                f"{type(model).__name__}: layer {index} keeps a {type(layer).__name__}, not keys "
                "and values or states of a fixed size; this architecture is not supported yet"
            )
        if key.dim() != 4 or key.shape[2] != tokens or value.shape[:3] != key.shape[:3]:
            raise ExportError(
                f"{type(model).__name__}: layer {index} caches shapes {tuple(key.shape)} and "
                f"{tuple(value.shape)}; [batch, heads, tokens, size] was expected"
            )
        size = sizes.get(index, (key.shape[1], key.shape[3], value.shape[3]))
        shapes.append(CacheShape(*size, index))
    if not shapes:
        raise ExportError(f"{type(model).__name__}: the model fills no cache")
    return tuple(shapes)


def _cache_argument(model: Any) -> str | None:
    names = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    if cached_sizes(model):
        return None  # adapters bring the cache
    raise ExportError(
        f"{type(model).__name__}: its forward takes no cache of transformers' kind (cache or "
        "past_key_values was looked for); what it keeps of the past cannot be exported"
    )


def _cache_arguments(model: Any, cache: Any) -> dict[str, Any]:
    name = _cache_argument(model)
    return {} if name is None else {name: cache, "use_cache": True}


class _Backbone(torch.nn.Module):
    """The model as a function of tensors, ending where its head begins."""

    def __init__(
        self, model: Any, active: Any, layers: Sequence[int], states: Sequence[StateShape]
    ) -> None:
        super().__init__()
        self.model = model
        self._active = active
        self._layers = layers
        self._states = states
        self._expanded = expanded_layers(model)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        given: list[torch.Tensor],
        past: tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]],
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        past_keys, past_values, past_states = past
        cache = RecurrentCache(
            past_keys,
            past_values,
            attention_mask,
            layers=self._layers,
            states=self._states,
            past_states=past_states,
            input_ids=input_ids,
        )
        cache.expanded = self._expanded
        self._active.set(cache)
        arguments = _cache_arguments(self.model, cache)
        if self._takes_positions:
            arguments["position_ids"] = torch.onnx.ops.symbolic(
                f"{DOMAIN}::{POSITIONS}",
                (attention_mask, input_ids),
                dtype=torch.int64,
                shape=input_ids.shape,
                version=1,
            )
        seen: list[torch.Tensor] = []
        hook = self.model.get_output_embeddings().register_forward_pre_hook(
            lambda _module, inputs: seen.append(inputs[0])
        )
        try:
            with beside_tokens(self.model, *given) if given else nullcontext():
                self.model(input_ids=input_ids, attention_mask=attention_mask, **arguments)
        finally:
            hook.remove()
        _check_reached(seen, cache)
        return (
            seen[0],
            [cache.present[i][0] for i in self._layers],
            [cache.present[i][1] for i in self._layers],
            [cache.present_states[s.kind, s.layer] for s in self._states],
        )


def _check_reached(seen: list[torch.Tensor], cache: RecurrentCache) -> None:
    if len(seen) != 1:
        raise ExportError(f"its head module ran {len(seen)} times, once was expected")
    missing = len(cache) - len(cache.present)
    if missing:
        raise ExportError(
            f"{missing} of {len(cache)} layers compute attention by themselves instead of "
            "through transformers' attention interface; this architecture is not supported yet"
        )
    if cache.missing():
        raise ExportError(
            f"{', '.join(cache.missing())}: computed by the layer itself instead of through "
            "transformers' convolution and scan functions; this architecture is not supported yet"
        )


def trace_backbone(
    model: Any, shapes: tuple[CacheShape | StateShape, ...], *, embeddings: bool = False
) -> ir.Model:
    """Export everything before the head as one graph.

    Inputs input_ids [batch, sequence], attention_mask [batch, total_sequence], with `embeddings`
    those of `headport.given_rows`, and per layer
    past_key_values.N.key / .value [batch, KV, past_sequence, D] or states, as `StateShape` names
    them; outputs hidden_states [batch, sequence, H], present.N.key / .value
    [batch, KV, total_sequence, D] and the next states.

    Raises:
        ExportError: If the model cannot be traced faithfully.
        NotDeferrableError: If tracing needs the value of a weight that is deferred.
    """
    attention = [s for s in shapes if isinstance(s, CacheShape)]
    states = [s for s in shapes if isinstance(s, StateShape)]
    layers = [s.layer for s in attention]
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    size = model.get_input_embeddings().weight.shape[1]
    rows = torch.ones((_BATCH, _SEQUENCE), dtype=torch.int64)
    given = [rows, torch.zeros((_GIVEN, size), dtype=dtype)] if embeddings else []
    arguments = (
        torch.ones((_BATCH, _SEQUENCE), dtype=torch.int64),
        torch.ones((_BATCH, _PAST + _SEQUENCE), dtype=torch.int64),
        given,
        (
            [torch.zeros((_BATCH, s.heads, _PAST, s.key_size), dtype=dtype) for s in attention],
            [torch.zeros((_BATCH, s.heads, _PAST, s.value_size), dtype=dtype) for s in attention],
            [s.zeros(_BATCH, dtype) for s in states],
        ),
    )
    # All caches share one symbol for the past: the fewer symbols, the faster the tracer.
    batch, past = torch.export.Dim("batch"), torch.export.Dim("past")
    new = torch.export.Dim("new")
    cached = [{0: batch, 2: past}] * len(layers)
    kept = [{0: batch}] * len(states)
    total = torch.export.Dim("total")
    beside = [{0: batch, 1: new}, {0: torch.export.Dim("given")}][: len(given)]
    dynamic = ({0: batch, 1: new}, {0: batch, 1: total}, beside, (cached, cached, kept))
    kinds = ("key", "value")
    inputs = [EMBEDDING_ROWS, EMBEDDINGS][: len(given)]
    inputs += [f"past_key_values.{i}.{kind}" for kind in kinds for i in layers]
    inputs += [s.past for s in states]
    outputs = ["hidden_states"]
    outputs += [f"present.{i}.{kind}" for kind in kinds for i in layers]
    outputs += [s.present for s in states]
    with trace_errors(model):
        with fake_weights(model), one_attention(model) as active:
            module = _Backbone(model, active, layers, states)
            with (
                one_recurrence(model, active),
                states_in_modules(model),
                adapted(model),
                one_op_per_layer(model),
            ):
                program = run_export(module, arguments, dynamic)
        exported = translate(program, ["input_ids", "attention_mask", *inputs], outputs)
    backbone = settle(exported, model)
    finish_graph(backbone, _cache_dims(shapes))
    check_attention(backbone, len(layers), type(model).__name__)
    if embeddings:
        check_embedded(backbone, type(model).__name__)
    return backbone


def run_export(
    module: torch.nn.Module, arguments: tuple[Any, ...], dynamic: tuple[Any, ...]
) -> torch.export.ExportedProgram:
    """Trace a module on example arguments; `dynamic` names the dimensions that vary."""
    with (
        torch.no_grad(),
        quiet_libraries(),
        mock.patch.object(torch.fx.config, "do_not_emit_stack_traces", True),
    ):
        return torch.export.export(module, arguments, dynamic_shapes=dynamic, strict=False)


@contextmanager
def trace_errors(model: Any) -> Iterator[None]:
    """Turn what tracing a model raises into an error that says what is the matter with it.

    Raises:
        ExportError: If the model cannot be traced faithfully.
        NotDeferrableError: If tracing needs the value of a weight that is deferred.
    """
    try:
        yield
    except Exception as error:  # the exporter wraps whatever model code raises
        cause = _cause(error)
        name = type(model).__name__
        if isinstance(cause, ExportError):
            raise ExportError(f"{name}: {cause}") from error
        if isinstance(cause, _NEED_VALUES):
            raise NotDeferrableError(f"tracing it needs values: {first_line(cause)}") from error
        raise ExportError(f"{name} cannot be traced: {first_line(cause)}") from error


def settle(exported: ir.Model, model: Any) -> ir.Model:
    """Optimise a translated graph and bind its weights to those of the model.

    Args:
        exported: Of a wrapper that holds the model as `model`.
        model: Gives weights their names and values.
    """
    # A graph remembers values it has lost and the rewriter's rules the last graph they saw, so
    # whatever stays in either would keep the model's memory: a clone starts without a past.
    graph: ir.Model = exported.clone()
    RemoveUnusedNodesPass()(graph)
    bind_weights(graph, model, prefix="model.")
    weights = list(graph.graph.initializers.values())
    store_transposed(graph)
    optimize_graph(graph)
    for value in weights:
        if graph.graph.initializers.get(value.name or "") is not value:
            value.const_value = None
    return graph


def _cache_dims(shapes: tuple[CacheShape | StateShape, ...]) -> dict[str, tuple[int, ...]]:
    dims: dict[str, tuple[int, ...]] = {}
    for shape in shapes:
        if isinstance(shape, StateShape):
            dims[shape.past] = dims[shape.present] = shape.dims
            continue
        for kind, size in (("key", shape.key_size), ("value", shape.value_size)):
            name = f"{shape.layer}.{kind}"
            dims[f"past_key_values.{name}"] = dims[f"present.{name}"] = (shape.heads, size)
    return dims


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
