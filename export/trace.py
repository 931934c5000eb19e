"""From a PyTorch model to the portable backbone: token ids → hidden states, with a KV cache."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    LiftConstantsToInitializersPass,
    RemoveUnusedNodesPass,
)
from onnxscript.optimizer import fold_constants, optimize
from onnxscript.rewriter.onnx_fusions import fuse

from headport.errors import ExportError
from headport.export.attention import TracedCache, one_attention
from headport.export.checkpoint import first_line, quiet_libraries, run_reference
from headport.export.functions import DOMAIN, OPSET, POSITIONS
from headport.export.hygiene import (
    check_attention,
    finish_graph,
    name_initializers,
    store_transposed,
)
from headport.export.lighten import skip_decompositions

__all__ = ["CacheShape", "cache_shapes", "trace_backbone"]

# Operators the exporter has no translation for → what they mean for the model.
_UNTRANSLATED = {"grouped_mm": "mixture-of-experts layers cannot be exported yet"}
# Sizes of the traced example: all different, none 1, so that no two dimensions are taken for one.
_BATCH, _SEQUENCE, _PAST = 2, 3, 5


@dataclass(frozen=True)
class CacheShape:
    """The fixed dimensions of one layer's cache: key [B, heads, P, key_size], value likewise."""

    heads: int
    key_size: int
    value_size: int


def cache_shapes(model: Any) -> tuple[CacheShape, ...]:
    """What each layer keeps per token, read off a cache that the model itself has filled.

    Raises:
        ExportError: If a layer keeps something other than the keys and values of its tokens.
    """
    from transformers import DynamicCache

    cache, tokens = DynamicCache(config=model.config), 2
    ids = torch.zeros((1, tokens), dtype=torch.int64)
    run_reference(model, input_ids=ids, use_cache=True, **{_cache_argument(model): cache})
    shapes = []
    for index, layer in enumerate(cache.layers):
        key, value = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(key, torch.Tensor) or not isinstance(value, torch.Tensor):
            raise ExportError(
                f"{type(model).__name__}: layer {index} keeps a {type(layer).__name__}, not keys "
                "and values; models with recurrent state cannot be exported yet"
            )
        if key.dim() != 4 or key.shape[2] != tokens or value.shape[:3] != key.shape[:3]:
            raise ExportError(
                f"{type(model).__name__}: layer {index} caches shapes {tuple(key.shape)} and "
                f"{tuple(value.shape)}; [batch, heads, tokens, size] was expected"
            )
        shapes.append(CacheShape(key.shape[1], key.shape[3], value.shape[3]))
    if not shapes:
        raise ExportError(f"{type(model).__name__}: the model fills no KV cache")
    return tuple(shapes)


def _cache_argument(model: Any) -> str:
    names = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise ExportError(f"{type(model).__name__}: its forward takes no KV cache")


class _Backbone(torch.nn.Module):
    """The model as a function of tensors, ending where its head begins."""

    def __init__(self, model: Any, active: Any) -> None:
        super().__init__()
        self.model = model
        self._active = active
        self._cache_argument = _cache_argument(model)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        past_keys: list[torch.Tensor],
        past_values: list[torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        cache = TracedCache(past_keys, past_values, attention_mask)
        self._active.set(cache)
        arguments: dict[str, Any] = {self._cache_argument: cache}
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
            self.model(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=True, **arguments
            )
        finally:
            hook.remove()
        _check_reached(seen, cache)
        layers = range(len(past_keys))
        return (
            seen[0],
            [cache.present[i][0] for i in layers],
            [cache.present[i][1] for i in layers],
        )


def _check_reached(seen: list[torch.Tensor], cache: TracedCache) -> None:
    if len(seen) != 1:
        raise ExportError(f"its head module ran {len(seen)} times, once was expected")
    missing = len(cache) - len(cache.present)
    if missing:
        raise ExportError(
            f"{missing} of {len(cache)} layers compute attention by themselves instead of "
            "through transformers' attention interface; this architecture is not supported yet"
        )


def trace_backbone(model: Any, shapes: tuple[CacheShape, ...]) -> ir.Model:
    """Export everything before the head as one graph.

    Inputs input_ids [batch, sequence], attention_mask [batch, total_sequence], and per layer
    past_key_values.N.key / .value [batch, KV, past_sequence, D]; outputs hidden_states
    [batch, sequence, H] and present.N.key / .value [batch, KV, total_sequence, D].

    Raises:
        ExportError: If the model cannot be traced faithfully.
    """
    layers = len(shapes)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    arguments = (
        torch.ones((_BATCH, _SEQUENCE), dtype=torch.int64),
        torch.ones((_BATCH, _PAST + _SEQUENCE), dtype=torch.int64),
        [torch.zeros((_BATCH, s.heads, _PAST, s.key_size), dtype=dtype) for s in shapes],
        [torch.zeros((_BATCH, s.heads, _PAST, s.value_size), dtype=dtype) for s in shapes],
    )
    # All caches share one symbol for the past: the fewer symbols, the faster the tracer.
    batch, past = torch.export.Dim("batch"), torch.export.Dim("past")
    new = torch.export.Dim("new")
    cached = [{0: batch, 2: past}] * layers
    dynamic = ({0: batch, 1: new}, {0: batch, 1: torch.export.Dim("total")}, cached, cached)
    kinds = ("key", "value")
    inputs = [f"past_key_values.{i}.{kind}" for kind in kinds for i in range(layers)]
    outputs = ["hidden_states"]
    outputs += [f"present.{i}.{kind}" for kind in kinds for i in range(layers)]
    try:
        with torch.no_grad(), quiet_libraries(), one_attention(model) as active:
            program = torch.export.export(
                _Backbone(model, active), arguments, dynamic_shapes=dynamic, strict=False
            )
        _check_operators(program)
        exported = _translate(program, ["input_ids", "attention_mask", *inputs], outputs)
    except Exception as error:  # the exporter wraps whatever model code raises
        cause = _cause(error)
        name = type(model).__name__
        if isinstance(cause, ExportError):
            raise ExportError(f"{name}: {cause}") from error
        raise ExportError(f"{name} cannot be traced: {first_line(cause)}") from error
    # A graph remembers values it has lost and the rewriter's rules the last graph they saw, so
    # whatever stays in either would keep the model's memory: a clone starts without a past.
    backbone: ir.Model = exported.model.clone()
    names = {p.data_ptr(): name for name, p in model.named_parameters() if p.numel()}
    name_initializers(backbone, names, prefix="model.")
    weights = list(backbone.graph.initializers.values())
    store_transposed(backbone)
    _optimize(backbone)
    for value in weights:
        if backbone.graph.initializers.get(value.name or "") is not value:
            value.const_value = None
    finish_graph(backbone, _cache_dims(shapes))
    check_attention(backbone, layers, type(model).__name__)
    return backbone


def _check_operators(program: torch.export.ExportedProgram) -> None:
    for node in program.graph.nodes:
        for part, reason in _UNTRANSLATED.items():
            if part in str(node.target):
                raise ExportError(reason)


def _optimize(model: ir.Model) -> None:
    # The exporter writes shape arithmetic once per layer; merging it first leaves the optimiser,
    # whose time grows with the square of the graph, a fraction of its work.
    RemoveUnusedNodesPass()(model)
    CommonSubexpressionEliminationPass()(model)
    optimize(model, num_iterations=1)
    fold_constants(model)  # what the first round uncovered
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    RemoveUnusedNodesPass()(model)
    fuse(model)


def _translate(program: torch.export.ExportedProgram, inputs: list[str], outputs: list[str]) -> Any:
    def attempt() -> Any:
        with torch.no_grad(), quiet_libraries():
            return torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=OPSET,
                input_names=inputs,
                output_names=outputs,
                optimize=False,
                verbose=False,
            )

    if skip_decompositions(program):
        try:
            return attempt()
        except torch.onnx.OnnxExporterError:
            del program.run_decompositions  # the class's own method again
    return attempt()


def _cache_dims(shapes: tuple[CacheShape, ...]) -> dict[str, tuple[int, int]]:
    dims = {}
    for i, shape in enumerate(shapes):
        for kind, size in (("key", shape.key_size), ("value", shape.value_size)):
            dims[f"past_key_values.{i}.{kind}"] = dims[f"present.{i}.{kind}"] = (shape.heads, size)
    return dims


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
