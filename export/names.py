"""Names in a graph that say where in the model a node comes from, and where the weights do."""

from __future__ import annotations

import ast
from collections import Counter

import onnx_ir as ir

from headport import __version__

__all__ = ["name_nodes", "note_provenance"]

_SCOPES = "pkg.torch.onnx.name_scopes"  # as the exporter notes them: a list of module paths, repr'd


def name_nodes(model: ir.Model, prefix: str) -> None:
    """Name each node `path.of.its.module/Operator`, numbered where a module has several.

    Args:
        model: As exported, with the exporter's notes still on its nodes.
        prefix: Of module paths, from the wrapper that was traced; left out.
    """
    seen: Counter[str] = Counter()
    for node in model.graph:
        path = _module_path(node, prefix)
        name = f"{path}/{node.op_type}" if path else node.op_type
        count = seen[name]
        seen[name] += 1
        node.name = f"{name}_{count}" if count else name


def _module_path(node: ir.Node, prefix: str) -> str:
    # The list ends with the operation's own name; what is left ends with its module.
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    path = str(scopes[-2]) if len(scopes) > 1 else ""
    return path.removeprefix(prefix) if path.startswith(prefix) else ""


def note_provenance(model: ir.Model, checkpoint: str, sha256: str, dtype: str) -> None:
    """Write into the graph's own metadata what made it from which weights."""
    model.metadata_props.update(
        {
            "headport.version": __version__,
            "headport.checkpoint": checkpoint,
            "headport.checkpoint_sha256": sha256,
            "headport.dtype": dtype,
        }
    )
