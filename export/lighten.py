"""Spare the exporter its second trace of a program that needs no decomposition.

`torch.onnx.export` retraces every program to decompose operators it has no translation for, which
takes longer than all else together. A program that mutates nothing and holds only operators with a
translation comes out of that as it went in, so it is enough to drop what nothing uses and to spell
conversions the way the translation knows them. What turns out to need more is retraced as usual.
"""

from __future__ import annotations

import torch

__all__ = ["skip_decompositions"]

_aten = torch.ops.aten


def skip_decompositions(program: torch.export.ExportedProgram) -> bool:
    """Make the exporter take a program as it is.

    Args:
        program: Changed in place; still exports by the ordinary road if that is taken later.

    Returns:
        Whether the program is free of mutation, so that it may be taken as it is.
    """
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    schemas = [node.target._schema for node in nodes if hasattr(node.target, "_schema")]
    if any(schema.is_mutable for schema in schemas) or program.graph_signature.buffers_to_mutate:
        return False
    for node in nodes:
        if node.target is _aten._assert_tensor_metadata.default:
            program.graph.erase_node(node)
        elif getattr(node.target, "overloadpacket", None) is _aten.to:
            _spell_conversion(program.graph, node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    program.run_decompositions = lambda *_args, **_kwargs: program
    return True


def _spell_conversion(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, torch.fx.Node)
    dtype = node.meta["val"].dtype
    if source.meta["val"].dtype == dtype:
        node.replace_all_uses_with(source)
        return
    with graph.inserting_before(node):
        copy = graph.call_function(_aten._to_copy.default, (source,), {"dtype": dtype})
    copy.meta = dict(node.meta)
    node.replace_all_uses_with(copy)
