"""A softmax over classes and over the tokens of a class."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from headport.export.heads.exported import ExportedHead, make_part
from headport.export.heads.modules import TreeSoftmax
from headport.manifest import TreeHead

__all__ = ["export_tree"]


def export_tree(name: str, head: TreeSoftmax, dtype: torch.dtype, meaning: str) -> ExportedHead:
    """Graphs and entry of a tree-shaped softmax; arguments and errors as `export_value`."""
    classes = make_part(head.classes, f"{name}.classes", dtype)
    members = make_part(head.members, f"{name}.members", dtype)
    order = head.order.numpy().astype(np.int32)
    sorted_already = bool((order == np.arange(len(order))).all())
    file = f"{name}.order.npy"
    entry = TreeHead(
        meaning=meaning,
        classes=classes.entry,
        members=members.entry,
        starts=(0, *itertools.accumulate(head.sizes.tolist())),
        order=None if sorted_already else file,
    )
    graphs = {part.entry.graph: part.graph for part in (classes, members)}
    files = {} if sorted_already else {file: order}
    return ExportedHead(name, entry, graphs, lambda h: {"log_probs": head.log_prob(h)}, files)
