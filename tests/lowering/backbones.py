"""Portable backbones written by hand: learned positions, and one attention call per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from headport.export.functions import attention_name, define_functions
from tests.toy_bundles import register

VOCAB, HIDDEN, CONTEXT = 31, 24, 32


@dataclass(frozen=True)
class Layer:
    """Features of one attention layer; 0 and False mean absent."""

    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    rounded: bool = False  # of slopes
    heads: int = 4
    kv_heads: int = 2
    key_size: int = 8
    value_size: int = 8
    angles: int = 0  # of rotary positions, 0 for none
    interleaved: int = 0
    key_factor: float = 1.0  # of the key's angles

    @property
    def function(self) -> str:
        return attention_name(
            sinks=self.sinks,
            slopes=self.slopes,
            rounded=self.rounded,
            softcap=self.softcap > 0,
            window=self.window > 0,
        )


class _Text:
    """Ports and nodes of the ONNX text, and the values of its initialisers."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.values: list[str] = []
        self.nodes: list[str] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.rng = np.random.default_rng(0)

    def weight(self, name: str, *shape: int, spread: float = 0.3) -> str:
        array = self.rng.normal(0, spread, shape)
        dtype = np.float16 if self.kind == "float16" else np.float32
        self.arrays[name] = array.astype(dtype)
        self.inputs.append(f"{self.kind}[{', '.join(map(str, shape))}] {name}")
        return name


def attention_backbone(
    layers: Sequence[Layer], *, half: bool = False, extra: str = "", result: str = ""
) -> ir.Model:
    """A portable backbone; `extra` is put before the last node, `result` replaces its input."""
    kind = "float16" if half else "float"
    text = _Text(kind)
    text.inputs += [
        "int64[batch, sequence] input_ids",
        "int64[batch, total_sequence] attention_mask",
    ]
    text.outputs.append(f"{kind}[batch, sequence, {HIDDEN}] hidden_states")
    text.nodes += [
        "position_ids = headport.Positions (attention_mask, input_ids)",
        "axis_2 = Constant <value_ints = [2]> ()",
        f"column = Cast <to = {10 if half else 1}> (position_ids)",
        "degrees = Unsqueeze (column, axis_2)",
        f"tokens = Gather ({text.weight('embed', VOCAB, HIDDEN, spread=1.0)}, input_ids)",
        f"places = Gather ({text.weight('table', CONTEXT, HIDDEN, spread=1.0)}, position_ids)",
        "h0 = Add (tokens, places)",
    ]
    for index, layer in enumerate(layers):
        _add_layer(text, index, layer)
    norm = text.weight("norm", HIDDEN)
    text.nodes += [extra, f"last = Identity ({result or f'h{len(layers)}'})"]
    text.nodes.append(
        f"hidden_states = RMSNormalization <axis = -1, epsilon = 1e-6> (last, {norm})"
    )
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 23, "headport": 1]>\n'
        f"backbone ({', '.join(text.inputs)}) => ({', '.join(text.outputs)})\n"
        f"<{', '.join(text.values)}>\n{{" + "\n".join(text.nodes) + "}"
    )
    for name, array in text.arrays.items():
        register(model, name, array)
    for value in (*model.graph.inputs, *model.graph.outputs):  # ONNX text allows no dots in names
        parts = (value.name or "").split("_")
        if parts[0] in ("past", "present"):
            parts[0] = {"past": "past_key_values"}.get(parts[0], parts[0])
            value.name = ".".join(parts)
    define_functions(model)
    return model


def _add_layer(text: _Text, index: int, layer: Layer) -> None:
    H, KV, D, Dv = layer.heads, layer.kv_heads, layer.key_size, layer.value_size
    for port, size in (("key", D), ("value", Dv)):
        dims = f"{text.kind}[batch, {KV}, {{}}, {size}]"
        text.inputs.append(f"{dims.format('past_sequence')} past_{index}_{port}")
        text.outputs.append(f"{dims.format('total_sequence')} present_{index}_{port}")
    for name, heads, size in (("q", H, D), ("k", KV, D), ("v", KV, Dv)):
        weight = text.weight(f"w{name}{index}", HIDDEN, heads * size)
        text.values += [
            f"{text.kind}[batch, sequence, {heads * size}] {name}_flat{index}",
            f"{text.kind}[batch, {heads}, sequence, {size}] {name}{index}",
        ]
        text.nodes += [
            f"{name}_flat{index} = MatMul (h{index}, {weight})",
            f"{name}_shape{index} = Constant <value_ints = [0, 0, {heads}, {size}]> ()",
            f"{name}_rows{index} = Reshape ({name}_flat{index}, {name}_shape{index})",
            f"{name}{index} = Transpose <perm = [0, 2, 1, 3]> ({name}_rows{index})",
        ]
    q, k = f"q{index}", f"k{index}"
    if layer.angles:
        q, k = _turned(text, index, layer)
    inputs = f"{q}, {k}, v{index}, past_{index}_key, past_{index}_value, attention_mask"
    if layer.sinks:
        inputs += f", {text.weight(f'sinks{index}', H, spread=1.0)}"
    if layer.slopes:
        name = text.weight(f"slopes{index}", H)
        text.arrays[name] = (2.0 ** -np.arange(1, H + 1)).astype(text.arrays[name].dtype)
        inputs += f", {name}"
    weight = text.weight(f"wo{index}", H * Dv, HIDDEN)
    text.nodes += [
        f"y{index}, present_{index}_key, present_{index}_value = headport.{layer.function} "
        f"<scale = 0.5, window = {layer.window}, softcap = {float(layer.softcap)}> ({inputs})",
        f"y_shape{index} = Constant <value_ints = [0, 0, {H * Dv}]> ()",
        f"y_flat{index} = Reshape (y{index}, y_shape{index})",
        f"o{index} = MatMul (y_flat{index}, {weight})",
        f"h{index + 1} = Add (h{index}, o{index})",
    ]


def _turned(text: _Text, index: int, layer: Layer) -> tuple[str, str]:
    q_angles = k_angles = _angles(text, f"q{index}", layer.angles, 1.0)
    if layer.key_factor != 1.0:
        k_angles = _angles(text, f"k{index}", layer.angles, layer.key_factor)
    for name, heads, angles in (("q", layer.heads, q_angles), ("k", layer.kv_heads, k_angles)):
        size = f"{text.kind}[batch, {heads}, sequence, {layer.key_size}]"
        text.values.append(f"{size} {name}t{index}")
        text.nodes.append(
            f"{name}t{index} = RotaryEmbedding <interleaved = {layer.interleaved}, "
            f"rotary_embedding_dim = {2 * layer.angles}> ({name}{index}, {angles})"
        )
    return f"qt{index}", f"kt{index}"


def _angles(text: _Text, name: str, count: int, factor: float) -> str:
    speeds = text.weight(f"speeds_{name}", count)
    text.arrays[speeds] = (factor * 3.0 ** -np.arange(count)).astype(text.arrays[speeds].dtype)
    text.nodes += [
        f"angles_{name} = Mul (degrees, {speeds})",
        f"cos_{name} = Cos (angles_{name})",
        f"sin_{name} = Sin (angles_{name})",
    ]
    return f"cos_{name}, sin_{name}"
