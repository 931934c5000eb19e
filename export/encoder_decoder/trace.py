"""From an encoder-decoder model to two graphs.

    encoder   source_ids, source_mask  or  input_features → cross_key_values
    backbone  input_ids, attention_mask, past, source_mask, cross_key_values
              → hidden_states, present

The encoder's graph ends with the keys and values that the decoder's layers make of what the encoder
gives. They are found by running the model's own decoder on one token and taking down what it puts
into its cache; nothing else of that run is used, so nothing else of it stays in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch
from transformers.cache_utils import EncoderDecoderCache

from headport.cache_ports import FEATURES, SOURCE_IDS, SOURCE_MASK, is_cross
from headport.errors import ExportError
from headport.export.attention import TracedCache, one_attention
from headport.export.checkpoint import run_reference
from headport.export.encoder_decoder.attention import (
    CrossCache,
    DecoderAttention,
    EncoderAttention,
    RecordedCross,
    any_mask,
    empty_cache,
)
from headport.export.encoder_decoder.families import Family, positions_from
from headport.export.encoder_decoder.relative import (
    far_rows,
    near_rows,
    relative_modules,
    relative_table,
    with_bias,
)
from headport.export.functions import DOMAIN, POSITIONS
from headport.export.hygiene import check_attention, finish_graph
from headport.export.source_function import SOURCE_ATTENTION
from headport.export.trace import run_export, settle, trace_errors
from headport.export.translate import translate

__all__ = ["DecoderShapes", "decoder_shapes", "example_inputs", "trace_decoder", "trace_encoder"]

# Sizes of the traced example: all different, none 1, so that no two dimensions are taken for one.
_BATCH, _SEQUENCE, _PAST, _SOURCE, _SOURCES = 2, 3, 5, 7, 4
_KINDS = ("key", "value")
_BOTH: tuple[str, ...] = ("source_batch", "source")


@dataclass(frozen=True)
class DecoderShapes:
    """What each layer of a decoder keeps: heads, key size, value size."""

    own: tuple[tuple[int, int, int], ...]  # of its tokens
    cross: tuple[tuple[int, int, int], ...]  # of the source

    def dims(self) -> dict[str, tuple[int, ...]]:
        """Name of each cache port → its fixed dimensions, in order."""
        found: dict[str, tuple[int, ...]] = {}
        for layer, (heads, *sizes) in enumerate(self.own):
            for kind, size in zip(_KINDS, sizes, strict=True):
                for port in ("past_key_values", "present"):
                    found[f"{port}.{layer}.{kind}"] = (heads, size)
        for layer, (heads, *sizes) in enumerate(self.cross):
            for kind, size in zip(_KINDS, sizes, strict=True):
                found[f"cross_key_values.{layer}.{kind}"] = (heads, size)
        return found


def example_inputs(model: Any, family: Family, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Inputs of a model's encoder, of a given length where it takes ids."""
    if family.reads == "ids":
        ids = torch.zeros((batch, length), dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    encoder, config = model.get_encoder(), model.config
    frames = config.max_source_positions * encoder.conv1.stride[0] * encoder.conv2.stride[0]
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return {"input_features": torch.zeros((batch, config.num_mel_bins, frames), dtype=dtype)}


def decoder_shapes(model: Any, family: Family) -> DecoderShapes:
    """What each layer keeps, read off a cache that the model itself has filled.

    Raises:
        ExportError: If it keeps something else than keys and values of tokens and source.
    """
    tokens = torch.zeros((1, 2), dtype=torch.int64)
    inputs = example_inputs(model, family, 1, 3)
    found = run_reference(model, **inputs, decoder_input_ids=tokens, use_cache=True).cache
    name = type(model).__name__
    if not isinstance(found, EncoderDecoderCache):
        raise ExportError(
            f"{name}: a cache of both halves was expected, it keeps a {type(found).__name__}"
        )
    shapes = DecoderShapes(
        tuple(_layer(each, name) for each in found.self_attention_cache.layers),
        tuple(_layer(each, name) for each in found.cross_attention_cache.layers),
    )
    if not shapes.own or len(shapes.own) != len(shapes.cross):
        raise ExportError(
            f"{name}: {len(shapes.own)} layers keep their tokens and {len(shapes.cross)} the "
            "source; each layer was expected to keep both"
        )
    return shapes


def _layer(layer: Any, name: str) -> tuple[int, int, int]:
    key, value = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(key, torch.Tensor) or not isinstance(value, torch.Tensor) or key.dim() != 4:
        raise ExportError(f"{name}: a layer keeps a {type(layer).__name__}, not keys and values")
    return key.shape[1], key.shape[3], value.shape[3]


class _Finite:
    """Stands for `torch.isfinite(x)`: says that x is not."""

    def all(self) -> bool:
        return False


@contextmanager
def _clamped_always() -> Iterator[None]:
    # Some encoders clamp half-precision states to a little below their range, only where one is
    # beyond it; a graph cannot ask. To what is within, clamping does nothing.
    with mock.patch.object(torch, "isfinite", lambda _x: _Finite()):
        yield


@contextmanager
def _without_positions(model: Any) -> Iterator[None]:
    # What a decoder adds to the scores of its own tokens has no part in what it makes of a source.
    modules = relative_modules(model.get_decoder())
    with with_bias(modules, [lambda *_args, **_kwargs: None] * len(modules)):
        yield


def _mask_argument(family: Family, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    # Of a decoder; one whose source is always full takes none.
    return {"encoder_attention_mask": mask} if family.reads == "ids" and mask is not None else {}


class _Encoder(torch.nn.Module):
    """A model's encoder, and the cross keys and values that its decoder makes of what it gives."""

    def __init__(
        self, model: Any, family: Family, attention: EncoderAttention, layers: int
    ) -> None:
        super().__init__()
        self.model = model
        self._family = family
        self._attention = attention
        self._layers = layers

    def forward(
        self, source: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        attention = self._attention
        attention.mask, attention.decoding, attention.layers = mask, False, 0
        states = self.model.get_encoder()(source, attention_mask=mask).last_hidden_state
        attention.decoding = True
        cross, token = RecordedCross(), (states.shape[0], 1)
        self.model.get_decoder()(
            input_ids=torch.zeros(token, dtype=torch.int64),
            attention_mask=torch.ones(token, dtype=torch.int64),
            encoder_hidden_states=states,
            cache=empty_cache(cross),
            use_cache=True,
            **_mask_argument(self._family, mask),
        )
        missing = [n for n in range(self._layers) if n not in cross.made]
        if missing:
            raise ExportError(f"decoder layers {missing} make no keys and values of the source")
        made = [cross.made[n] for n in range(self._layers)]
        return [key for key, _ in made], [value for _, value in made]


def trace_encoder(model: Any, family: Family, shapes: DecoderShapes) -> ir.Model:
    """Export the encoder, up to the cross keys and values of each decoder layer.

    Inputs source_ids and source_mask [source_batch, source], or input_features [source_batch, F,
    frames]; outputs cross_key_values.N.key / .value [source_batch, H, source, D].

    Raises:
        ExportError: If the model cannot be traced faithfully.
    """
    given = [*example_inputs(model, family, _BATCH, _SOURCE).values()]
    batch = torch.export.Dim("source_batch")
    place = {0: batch, 1: torch.export.Dim("source")} if family.reads == "ids" else {0: batch}
    arguments = (given[0], given[1] if len(given) > 1 else None)
    dynamic = (place, None if arguments[1] is None else place)
    names = [SOURCE_IDS, SOURCE_MASK] if family.reads == "ids" else [FEATURES]
    outputs = _names("cross_key_values", len(shapes.cross))
    modules = relative_modules(model.get_encoder())
    functions = [far_rows(relative_table(module, both_ways=True)) for module in modules]
    attention = EncoderAttention()
    with trace_errors(model):
        with (
            one_attention(model, attention, any_mask),
            with_bias(modules, functions),
            _without_positions(model),
            _clamped_always(),
        ):
            module = _Encoder(model, family, attention, len(shapes.cross))
            program = run_export(module, arguments, dynamic)
        exported = translate(program, names, outputs)
    graph = settle(exported, model)
    free = dict.fromkeys((SOURCE_IDS, SOURCE_MASK), _BOTH)
    if family.reads == "features":
        # All of one length, so the number of places is fixed as well.
        free = dict.fromkeys((FEATURES, *outputs), _BOTH[:1])
    finish_graph(graph, shapes.dims(), "encoder", free)
    _check_source_attention(graph, attention.layers, type(model).__name__)
    return graph


class _Decoder(torch.nn.Module):
    """A model's decoder as a function of tensors, ending where its head begins."""

    def __init__(
        self,
        model: Any,
        family: Family,
        active: Any,
        attention: DecoderAttention,
        positions: dict[str, torch.Tensor],
    ) -> None:
        super().__init__()
        self.model = model
        self._family = family
        self._active = active
        self._attention = attention
        self._positions = positions

    def forward(  # noqa: PLR0917, the exporter passes tensors by position
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        source_mask: torch.Tensor,
        past_keys: list[torch.Tensor],
        past_values: list[torch.Tensor],
        cross_keys: list[torch.Tensor],
        cross_values: list[torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        own = TracedCache(past_keys, past_values, attention_mask)
        self._active.set(own)
        cross = self._attention.cross = CrossCache(cross_keys, cross_values, source_mask)
        self._positions["position_ids"] = torch.onnx.ops.symbolic(
            f"{DOMAIN}::{POSITIONS}",
            (attention_mask, input_ids),
            dtype=torch.int64,
            shape=input_ids.shape,
            version=1,
        )
        # Only its shape is looked at: the keys and values made of it are there already.
        width = self.model.config.d_model
        states = cross_keys[0].new_empty((input_ids.shape[0], source_mask.shape[1], width))
        hidden = self.model.get_decoder()(
            input_ids=input_ids,
            attention_mask=attention_mask,
            encoder_hidden_states=states,
            cache=EncoderDecoderCache(own, cross),
            use_cache=True,
            **_mask_argument(self._family, source_mask),
        ).last_hidden_state
        layers = range(len(past_keys))
        missing = [n for n in layers if n not in own.present or n not in cross.read]
        if missing:
            raise ExportError(
                f"layers {missing} compute attention by themselves instead of through "
                "transformers' attention interface; this architecture is not supported"
            )
        return hidden, [own.present[n][0] for n in layers], [own.present[n][1] for n in layers]


def trace_decoder(model: Any, family: Family, shapes: DecoderShapes) -> ir.Model:
    """Export the decoder up to the head, as the backbone of a bundle.

    Besides what the backbone of a decoder-only model has: inputs source_mask [source_batch, source]
    and cross_key_values.N.key / .value [source_batch, H, source, D], where source_batch is that of
    the tokens, or 1.

    Raises:
        ExportError: If the model cannot be traced faithfully.
    """
    layers = len(shapes.own)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    arguments = (
        torch.ones((_BATCH, _SEQUENCE), dtype=torch.int64),
        torch.ones((_BATCH, _PAST + _SEQUENCE), dtype=torch.int64),
        torch.ones((_SOURCES, _SOURCE), dtype=torch.int64),
        [torch.zeros((_BATCH, h, _PAST, size), dtype=dtype) for h, size, _ in shapes.own],
        [torch.zeros((_BATCH, h, _PAST, size), dtype=dtype) for h, _, size in shapes.own],
        [torch.zeros((_SOURCES, h, _SOURCE, size), dtype=dtype) for h, size, _ in shapes.cross],
        [torch.zeros((_SOURCES, h, _SOURCE, size), dtype=dtype) for h, _, size in shapes.cross],
    )
    batch, past = torch.export.Dim("batch"), torch.export.Dim("past")
    sources, source = torch.export.Dim("source_batch"), torch.export.Dim("source")
    cached, read = [{0: batch, 2: past}] * layers, [{0: sources, 2: source}] * layers
    new, total = torch.export.Dim("new"), torch.export.Dim("total")
    own = ({0: batch, 1: new}, {0: batch, 1: total}, {0: sources, 1: source})
    inputs = ["input_ids", "attention_mask", SOURCE_MASK]
    inputs += [*_names("past_key_values", layers), *_names("cross_key_values", layers)]
    outputs = ["hidden_states", *_names("present", layers)]
    decoder = model.get_decoder()
    modules = relative_modules(decoder)
    functions = [near_rows(relative_table(module)) for module in modules]
    attention = DecoderAttention()
    with trace_errors(model):
        with (
            one_attention(model, attention, any_mask) as active,
            positions_from(decoder, family) as positions,
            with_bias(modules, functions),
            _clamped_always(),
        ):
            module = _Decoder(model, family, active, attention, positions)
            dynamic = (*own, cached, cached, read, read)
            program = run_export(module, arguments, dynamic)
        exported = translate(program, inputs, outputs)
    graph = settle(exported, model)
    finish_graph(graph, shapes.dims())
    name = type(model).__name__
    check_attention(graph, layers, name)
    _check_source_attention(graph, layers, name)
    return graph


def _names(port: str, layers: int) -> list[str]:
    return [f"{port}.{layer}.{kind}" for kind in _KINDS for layer in range(layers)]


def _check_source_attention(graph: ir.Model, layers: int, name: str) -> None:
    calls = [n for n in graph.graph if n.op_type.startswith(SOURCE_ATTENTION)]
    if len(calls) != layers:
        raise ExportError(
            f"{name}: {layers} layers that attend to the source expected in the graph, "
            f"{len(calls)} found; this architecture is not supported"
        )
    ports = [v for v in graph.graph.inputs if is_cross(v.name or "")]
    read: Sequence[str] = [str(v.name) for call in calls for v in call.inputs if v in ports]
    if sorted(read) != sorted(str(v.name) for v in ports):
        raise ExportError(f"{name}: attention reads {', '.join(read)}; each cross port once")
