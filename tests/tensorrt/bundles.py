"""Bundles with fewer head rows, made without `headport prune`: only rows of the head are cut."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir

from headport.bundle import Bundle, draft_bundle
from headport.graphs import load_graphs, rewrite_bundle
from headport.ledger import head_weight
from headport.selftest import write_selftest


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
