"""What the manifest says about a model: facts read off the model and the graph, not the config."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any, Literal

import onnx_ir as ir

from headport import __version__
from headport.cache_ports import is_past
from headport.errors import ExportError
from headport.export.functions import ATTENTION, DOMAIN
from headport.export.head import HeadTransform
from headport.manifest import Head, Model, Vocabulary

__all__ = [
    "attention_windows",
    "context_length",
    "head_entry",
    "library_versions",
    "model_entry",
    "vocabulary_entry",
]

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# States do not grow and windows reach no further back, so a model of these has no limit of its own.
_UNLIMITED_CONTEXT = 1 << 20  # tokens
# ALiBi has no table that ends; families that state no length (Bloom) were trained on this many.
_ALIBI_CONTEXT = 2048
_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime")


def context_length(model: Any) -> int | None:
    """Tokens the model can hold, as its configuration states it; None if it states none."""
    config = model.config.get_text_config()
    for key in _CONTEXT_KEYS:
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def attention_windows(backbone: ir.Model) -> tuple[int, ...]:
    """Window of each attention layer in graph order, 0 for none; counts the token itself."""
    return tuple(node.attributes["window"].as_int() for node in _attention_nodes(backbone))


def _attention_nodes(backbone: ir.Model) -> list[ir.Node]:
    return [n for n in backbone.graph if n.domain == DOMAIN and n.op_type.startswith(ATTENTION)]


def model_entry(
    model: Any, backbone: ir.Model, head: HeadTransform, dtype: Literal["fp32", "fp16", "bf16"]
) -> Model:
    """The manifest's `model` record.

    Raises:
        ExportError: If the configuration states no context length and the model needs one.
    """
    nodes = _attention_nodes(backbone)
    max_context = context_length(model)
    if max_context is None and all(attention_windows(backbone)):
        max_context = _UNLIMITED_CONTEXT
    if max_context is None and all("slopes" in node.op_type for node in nodes):
        max_context = _ALIBI_CONTEXT
    if max_context is None:
        raise ExportError(
            f"{type(model).__name__}: its config states no context length "
            f"({', '.join(_CONTEXT_KEYS)} were looked for)"
        )
    layers = {v.name.split(".")[1] for v in backbone.graph.inputs if v.name and is_past(v.name)}
    heads = {q.shape[1] for n in nodes if (q := n.inputs[0]) is not None and q.shape is not None}
    only = next(iter(heads)) if len(heads) == 1 else None
    return Model(
        architecture=type(model).__name__,
        hidden_size=head.weight.shape[1],
        layers=len(layers),
        max_context=max_context,
        dtype=dtype,
        query_heads=only if isinstance(only, int) else None,
    )


def head_entry(head: HeadTransform, graph: str) -> Head:
    """The manifest's record of a head that gives logits."""
    return Head(
        graph=graph,
        outputs="logits",
        vocab_size=head.weight.shape[0],
        scale=head.scale,
        softcap=head.softcap,
        bias=head.bias is not None,
        weight=head.weight_name,
        tied=head.tied,
        quantization=None,
    )


def vocabulary_entry(rows: int, tokenizer: Any) -> Vocabulary:
    """The manifest's `vocabulary` record, of matrices with so many rows.

    Rows above the tokenizer's highest id are padding: no text gives them and nothing decodes them.
    Rows that the tokenizer names cannot be told from tokens, so they count.
    """
    highest = max(tokenizer.get_vocab().values())
    return Vocabulary(size=min(rows, highest + 1), padded_size=rows, kept_size=None, map=None)


def library_versions() -> dict[str, str]:
    """Versions of all that shapes an exported bundle."""
    found = {"headport": __version__, "python": platform.python_version()}
    return found | {package: version(package) for package in _PACKAGES}
