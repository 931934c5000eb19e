"""One more head over the vocabulary, such as one that predicts a token further ahead."""

from __future__ import annotations

import torch

from headport.export.heads.exported import ExportedHead, Layer, layers_graph, make_part
from headport.export.heads.modules import VocabularyHead

__all__ = ["export_vocabulary"]


def export_vocabulary(
    name: str, head: VocabularyHead, dtype: torch.dtype, meaning: str
) -> ExportedHead:
    """Graphs and entry of a head over the vocabulary; arguments and errors as `export_value`."""
    del meaning  # the entry of such a head says what it computes
    graphs, transform = {}, None
    if len(head.blocks):
        transform = f"head.{name}.blocks"
        layers = [Layer(block, "silu", residual=True) for block in head.blocks]  # type: ignore[arg-type]
        graphs[transform] = layers_graph(layers, transform)
    part = make_part(head.output, name, dtype, transform)
    graphs[part.entry.graph] = part.graph
    return ExportedHead(name, part.entry, graphs, lambda h: {"logits": head(h)})
