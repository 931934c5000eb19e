"""A bundle whose backbone holds every kind of matrix, small and of prime sizes, and its formula."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from headport.bundle import Bundle
from tests.toy_bundles import register, write_toy

V, H, F = 31, 37, 53
UP, DOWN = "layers.0.up.weight", "layers.0.down.weight"
MIX, GATE, STACK, EMBED = "layers.0.mix.weight", "layers.0.gate.weight", "stack", "embed.weight"
MATRICES = (UP, DOWN, MIX, GATE)
# How each is called in ONNX text, which allows no dots, and in the graph.
_NAMES = {
    "up": f"{UP}.transposed",
    "down": f"{DOWN}.transposed",
    "mix": MIX,
    "gate": GATE,
    "stack": STACK,
    "embed": EMBED,
    "bias": "layers.0.gate.bias",
}


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Each weight outputs first, W [N, K], by name; EMBED [V, H]; STACK [1, H, H]."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    return {
        UP: normal(F, H),
        DOWN: normal(H, F),
        MIX: normal(H, H),
        GATE: normal(H, H),
        STACK: normal(1, H, H),
        EMBED: normal(V, H) * 3,
        "layers.0.gate.bias": normal(H),
    }


def backbone(found: dict[str, np.ndarray], kind: str = "float") -> ir.Model:
    """Products of every kind, one matrix read twice in a row, and a stack that is no matrix."""
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["": 23]>
        backbone (int64[batch, sequence] input_ids, int64[batch, total_sequence] attention_mask,
                  {kind}[{H}, {F}] up, {kind}[{F}, {H}] down, {kind}[{H}, {H}] mix,
                  {kind}[{H}, {H}] gate, {kind}[1, {H}, {H}] stack, {kind}[{V}, {H}] embed,
                  {kind}[{H}] bias) => ({kind}[batch, sequence, {H}] hidden_states)
        <{kind}[batch, sequence, {H}] h0, {kind}[batch, sequence, {F}] a,
         {kind}[batch, sequence, {F}] b, {kind}[batch, sequence, {H}] c,
         {kind}[batch, sequence, {H}] h1, {kind}[batch, sequence, {H}] d,
         {kind}[batch, sequence, {H}] e, {kind}[rows, {H}] flat, {kind}[rows, {H}] g,
         {kind}[batch, sequence, {H}] s>
        {{
            h0 = Gather (embed, input_ids)
            a = MatMul (h0, up)
            b = Tanh (a)
            c = MatMul (b, down)
            h1 = Add (h0, c)
            turned = Transpose <perm = [1, 0]> (mix)
            d = MatMul (h1, turned)
            e = MatMul (d, turned)
            rows = Constant <value_ints = [-1, {H}]> ()
            flat = Reshape (e, rows)
            g = Gemm <transB = 1> (flat, gate, bias)
            shape = Shape (e)
            g3 = Reshape (g, shape)
            s = MatMul (h1, stack)
            sum = Add (g3, s)
            hidden_states = Add (h1, sum)
        }}
    """)
    half = kind == "float16"
    for short, name in _NAMES.items():
        array = found[name.removesuffix(".transposed")]
        array = np.ascontiguousarray(array.T if short in ("up", "down") else array)
        register(model, short, array.astype(np.float16) if half else array)
        value = model.graph.initializers.pop(short)
        value.name = name
        model.graph.register_initializer(value)
    return model


def forward(found: dict[str, np.ndarray], token_ids: np.ndarray) -> np.ndarray:
    """The same in float64: hidden states [..., H] of token ids."""
    w = {name: array.astype(np.float64) for name, array in found.items()}
    h0 = w[EMBED][token_ids]
    h1 = h0 + np.tanh(h0 @ w[UP].T) @ w[DOWN].T
    e = h1 @ w[MIX].T @ w[MIX].T
    return h1 + (e @ w[GATE].T + w["layers.0.gate.bias"]) + h1 @ w[STACK][0]


def mlp_bundle(
    folder: Path, found: dict[str, np.ndarray] | None = None, *, tied: bool = False
) -> Bundle:
    """The backbone above, and a head [V, H], tied to the embedding or not."""
    found = found or weights()
    head = found[EMBED] if tied else np.random.default_rng(9).normal(size=(V, H))
    bundle = write_toy(folder, head.astype(np.float32), backbone=backbone(found), max_context=16)
    if not tied:
        return bundle
    import msgspec

    from headport.manifest import encode_manifest

    entry = msgspec.structs.replace(bundle.manifest.heads["lm"], weight=EMBED, tied=True)
    manifest = msgspec.structs.replace(bundle.manifest, heads={"lm": entry})
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))
    return Bundle.open(folder)
