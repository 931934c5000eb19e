"""A value head: one scalar per position, or per text."""

from __future__ import annotations

import torch

from headport.export.heads.exported import ExportedHead, Layer, layers_graph, make_part
from headport.export.heads.modules import ValueHead
from headport.manifest import ValueHead as Entry

__all__ = ["export_value"]


def export_value(name: str, head: ValueHead, dtype: torch.dtype, meaning: str) -> ExportedHead:
    """Graphs and entry of a value head.

    Args:
        name: The head's name.
        head: The trained module.
        dtype: Precision of the bundle.
        meaning: Whence it comes, in words.

    Raises:
        ExportError: If a weight is not finite.
    """
    graphs, transform = {}, None
    if head.inner is not None:
        transform = f"head.{name}.inner"
        graphs[transform] = layers_graph(
            [Layer(head.inner.linear, head.inner.activation)], transform
        )
    part = make_part(head.summary, name, dtype, transform)
    entry = Entry(
        meaning=meaning,
        head=part.entry,
        pooling=head.config["pooling"],
        pad_id=head.config["pad_id"],
    )
    return ExportedHead(
        name, entry, graphs | {part.entry.graph: part.graph}, lambda h: {"values": head(h)}
    )
