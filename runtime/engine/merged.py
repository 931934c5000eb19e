"""Backbone and head as one graph, for one plan: logits, and the hidden states for other heads."""

from __future__ import annotations

from pathlib import Path

from headport.bundle import Bundle
from headport.errors import UsageError
from headport.graphs import graph_entry, load_graphs, write_graphs
from headport.manifest import Port
from headport.merge.graph import join_head

__all__ = ["write_merged"]

_FILE = "merged.onnx"


def write_merged(bundle: Bundle, folder: Path) -> tuple[Path, tuple[Port, ...]]:
    """Write the merged graph into an empty folder; returns its file and inputs.

    Raises:
        UsageError: If the bundle has not exactly one head, or one whose graph gives more than
            logits, which have no place in a merged plan.
    """
    manifest = bundle.manifest
    if len(manifest.heads) != 1:
        raise UsageError(f"--merged needs one head, {len(manifest.heads)} found; leave it out")
    [head] = manifest.heads.values()
    more = [p.name for p in manifest.graphs[head.graph].outputs if p.name != "logits"]
    if more:
        raise UsageError(f"--merged: the head also gives {', '.join(more)}; leave out --top-k")
    models = load_graphs(bundle)
    backbone = models[manifest.backbone_name]
    hidden = next(v for v in backbone.graph.outputs if v.name == "hidden_states")
    model = join_head(backbone, models[head.graph])
    hidden.name = "hidden_states"
    model.graph.outputs.append(hidden)
    write_graphs({"merged": model}, {"merged": _FILE}, folder)
    return folder / _FILE, graph_entry(model, _FILE, "backbone").inputs
