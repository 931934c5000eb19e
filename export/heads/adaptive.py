"""`torch.nn.AdaptiveLogSoftmaxWithLoss`: a shortlist, and tail clusters behind projections.

    shortlist  hidden_states [N, H] → [N, cutoffs[0] + clusters]
    tail i     hidden_states [N, H] → states [N, F_i] → [N, cutoffs[i] − cutoffs[i − 1]]

What makes log-probabilities of them is arithmetic of the runtime (`headport.clustered`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headport.errors import ExportError
from headport.export.heads.exported import ExportedHead, Layer, layers_graph, make_part
from headport.manifest import AdaptiveHead

__all__ = ["export_adaptive"]


def export_adaptive(
    name: str, head: nn.AdaptiveLogSoftmaxWithLoss, dtype: torch.dtype, meaning: str
) -> ExportedHead:
    """Graphs and entry of an adaptive softmax; arguments and errors as `export_value`.

    Raises:
        ExportError: Also if a cluster's projection has no width left.
    """
    cutoffs = tuple(head.cutoffs)
    shortlist = make_part(head.head, f"{name}.shortlist", dtype)
    graphs, tails = {shortlist.entry.graph: shortlist.graph}, []
    tail: Any
    for n, tail in enumerate(head.tail, 1):
        projection, output = tail
        if not projection.out_features:
            raise ExportError(
                f"head {name}: cluster {n} is projected to no value at all, so its tokens cannot "
                "be told apart; use a smaller div_value"
            )
        transform = f"head.{name}.projection{n}"
        graphs[transform] = layers_graph([Layer(projection, "none")], transform)
        part = make_part(output, f"{name}.tail{n}", dtype, transform)
        graphs[part.entry.graph] = part.graph
        tails.append(part.entry)
    entry = AdaptiveHead(
        meaning=meaning, shortlist=shortlist.entry, tails=tuple(tails), cutoffs=cutoffs
    )
    return ExportedHead(name, entry, graphs, lambda h: {"log_probs": head.log_prob(h)})
