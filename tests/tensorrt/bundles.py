"""Bundles of a part of another one: fewer rows of its head, or its head without its backbone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir

from headport.bundle import Bundle, draft_bundle
from headport.graphs import load_graphs, rewrite_bundle
from headport.ledger import head_weight, read_tensor
from headport.selftest import write_selftest
from tests.toy_bundles import write_toy


def differing_share(one: Path, two: Path) -> float:
    """Bytes of two plans of equal length that differ, as a share of all; else 1."""
    first, second = (np.fromfile(path, np.uint8) for path in (one, two))
    return float((first != second).mean()) if len(first) == len(second) else 1.0


def cut_head(source: Bundle, output: Path, ids: np.ndarray) -> Bundle:
    """A portable bundle whose head keeps the rows of these ids, in this order."""
    manifest, models = source.manifest, load_graphs(source)
    head = manifest.heads["lm"]
    _, name = head_weight(manifest, head)
    model = models[head.graph]
    weight = model.graph.initializers[name]
    rows = weight.const_value.numpy()[ids].copy()
    weight.const_value, weight.shape = ir.tensor(rows, name=name), ir.Shape(rows.shape)
    for node in model.graph:
        for value in node.outputs:
            if value.shape is not None and head.vocab_size in tuple(value.shape):
                value.shape = ir.Shape(
                    [len(ids) if d == head.vocab_size else d for d in value.shape]
                )
    with draft_bundle(output, force=True) as draft:
        changed = rewrite_bundle(source, models, draft.path)
        np.save(draft.path / "vocab_map.npy", ids.astype(np.int32))
        cut = msgspec.structs.replace(head, vocab_size=len(ids), weight=name, tied=False)
        vocabulary = msgspec.structs.replace(
            manifest.vocabulary, kept_size=len(ids), map="vocab_map.npy"
        )
        changed = msgspec.structs.replace(changed, heads={"lm": cut}, vocabulary=vocabulary)
        return draft.commit(write_selftest(draft.preview(changed)))


def head_alone(source: Bundle, output: Path) -> Bundle:
    """The head's weight behind a lookup: what becomes of a head needs no backbone to run."""
    entry, _ = head_weight(source.manifest, source.manifest.heads["lm"])
    context = source.manifest.model.max_context
    return write_toy(output, np.array(read_tensor(source, entry)), max_context=context)
