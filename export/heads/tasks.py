"""Named tasks behind one shared layer."""

from __future__ import annotations

import torch

from headport.export.heads.exported import ExportedHead, Layer, layers_graph, make_part
from headport.export.heads.modules import MultiTaskHead
from headport.manifest import Task, TasksHead

__all__ = ["export_tasks"]


def export_tasks(name: str, head: MultiTaskHead, dtype: torch.dtype, meaning: str) -> ExportedHead:
    """Graphs and entry of a multi-task head; arguments and errors as `export_value`."""
    graphs, shared = {}, None
    if head.shared is not None:
        shared = f"head.{name}.shared-layer"  # no task can have this name
        graphs[shared] = layers_graph([Layer(head.shared.linear, head.shared.activation)], shared)
    tasks = {}
    for task, labels in head.config["tasks"].items():
        part = make_part(head.tasks[task], f"{name}.{task}", dtype, shared)  # type: ignore[arg-type]
        graphs[part.entry.graph] = part.graph
        tasks[task] = Task(head=part.entry, labels=tuple(labels))
    entry = TasksHead(
        meaning=meaning,
        tasks=tasks,
        pooling=head.config["pooling"],
        pad_id=head.config["pad_id"],
    )
    return ExportedHead(name, entry, graphs, lambda h: {t: head.scores(h, t) for t in tasks})
