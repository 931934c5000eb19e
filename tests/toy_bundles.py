"""Bundles whose graphs run although no model was exported: a head of any shape behind a lookup."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir

from headport.bundle import Bundle, draft_bundle
from headport.graphs import graph_entry, write_graphs
from headport.manifest import Head, Model, Vocabulary
from headport.selftest import write_selftest
from tests.bundles import manifest

HEAD_FILES = {"backbone": "backbone.onnx", "head.lm": "head.lm.onnx"}


def register(model: ir.Model, name: str, array: np.ndarray) -> None:
    """Give an initialiser, declared as an input of the ONNX text, its value."""
    port = next(value for value in model.graph.inputs if value.name == name)
    model.graph.inputs.remove(port)
    port.const_value = ir.tensor(array, name=name)
    model.graph.register_initializer(port)


def lookup_backbone(embedding: np.ndarray) -> ir.Model:
    """hidden_states = embedding[input_ids]: no attention, no cache."""
    V, H = embedding.shape
    kind = {"float32": "float", "float16": "float16"}[str(embedding.dtype)]
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["": 23]>
        backbone (int64[batch, sequence] input_ids, int64[batch, total_sequence] attention_mask,
                  {kind}[{V}, {H}] embed) => ({kind}[batch, sequence, {H}] hidden_states)
        {{ hidden_states = Gather (embed, input_ids) }}
    """)
    register(model, "embed", embedding)
    return model


def head_graph(
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> ir.Model:
    """A portable head as export writes it."""
    V, H = weight.shape
    half = weight.dtype == np.float16
    kind = "float16" if half else "float"
    ports = [f"{kind}[rows, {H}] hidden_states", f"{kind}[{V}, {H}] w"]
    x, w, lines = "hidden_states", "w", []
    if half:
        lines += ["x_float = Cast <to = 1> (hidden_states)", "w_float = Cast <to = 1> (w)"]
        x, w = "x_float", "w_float"
    if bias is not None:
        ports.append(f"float[{V}] b")
    lines.append(f"p = Gemm <transB = 1> ({x}, {w}{', b' if bias is not None else ''})")
    last = "p"
    if scale != 1.0:
        lines.append(f"s = Constant <value_float = {scale}> ()")
        lines.append("scaled = Mul (p, s)")
        last = "scaled"
    if softcap is not None:
        lines.append(f"c = Constant <value_float = {softcap}> ()")
        lines += [f"ratio = Div ({last}, c)", "squashed = Tanh (ratio)"]
        lines.append("capped = Mul (squashed, c)")
        last = "capped"
    lines.append(f"logits = Identity ({last})")
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 23]>\n'
        f"head_lm ({', '.join(ports)}) => (float[rows, {V}] logits)\n{{" + "\n".join(lines) + "}"
    )
    model.graph.name = "head.lm"
    register(model, "w", weight)
    if bias is not None:
        register(model, "b", bias.astype(np.float32))
    return model


def write_toy(
    output: Path,
    weight: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    tied: bool = False,
    backbone: ir.Model | None = None,
    max_context: int = 32,
    companions: Callable[[Path], object] = lambda folder: None,
    **changes: Any,
) -> Bundle:
    """Write a bundle with this head, W [V, H], behind a lookup of V rows or a given backbone.

    `companions` writes more files into the bundle's folder.
    """
    V, H = weight.shape
    rng = np.random.default_rng(5)
    embedding = weight if tied else rng.normal(size=(V, H)).astype(weight.dtype)
    graphs = {
        "backbone": backbone or lookup_backbone(embedding),
        "head.lm": head_graph(weight, bias, scale, softcap),
    }
    head = Head(
        graph="head.lm",
        outputs="logits",
        vocab_size=V,
        scale=scale,
        softcap=softcap,
        bias=bias is not None,
        weight="embed" if tied else "w",
        tied=tied,
        quantization=None,
    )
    dtype = "fp16" if weight.dtype == np.float16 else "fp32"
    with draft_bundle(output, force=False) as draft:
        (draft.path / "LICENSE").write_text("do as you like\n")
        companions(draft.path)
        tensors = write_graphs(graphs, HEAD_FILES, draft.path)
        made = manifest(
            graphs={
                name: graph_entry(graph, HEAD_FILES[name], name.split(".")[0])
                for name, graph in graphs.items()
            },
            heads={"lm": head},
            tensors=tensors,
            model=Model(
                architecture="Toy",
                hidden_size=H,
                layers=0,
                max_context=max_context,
                dtype=dtype,
            ),
            vocabulary=Vocabulary(size=V, padded_size=V, kept_size=None, map=None),
            session_options={"session.qdq_matmulnbits_accuracy_level": "0"},
        )
        preview = draft.preview(msgspec.structs.replace(made, **changes))
        return draft.commit(write_selftest(preview))
