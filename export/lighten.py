"""Spare the exporter work whose result is known.

`torch.onnx.export` retraces every program to decompose operators it has no translation for, which
takes longer than all else together. A program that mutates nothing and holds only operators with a
translation comes out of that as it went in, so it is enough to drop what nothing uses and to spell
conversions the way the translation knows them. What turns out to need more is retraced as usual.

It then runs the program once more, on fake tensors with symbolic shapes, to find where operands
have to be promoted to a common type; and it parses the source of every translation it has, of
thousands of lines, for the name of their domain. Neither is needed where nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from onnxscript import values
from torch.onnx._internal.fx.passes import type_promotion

__all__ = ["known_results_reused", "skip_decompositions"]

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


@contextmanager
def known_results_reused() -> Iterator[None]:
    """Let `torch.onnx.export` take results from the trace instead of computing them again."""
    interpreter = type_promotion._TypePromotionInterpreter
    run = interpreter.run_node

    def run_node(self: Any, node: torch.fx.Node) -> Any:
        # Up to the first operand that is promoted, every node gives what it gave in the trace.
        if node.op != "call_function" or "val" not in node.meta or getattr(self, "_changed", False):
            return run(self, node)
        before = node.args, node.kwargs
        with self._set_current_node(node):
            rule = type_promotion.get_type_promotion_rule(node, self.type_promotion_table)
            if rule is not None:
                self._maybe_promote_node(node, rule)
        if before == (node.args, node.kwargs):
            return node.meta["val"]
        self._changed = True
        return torch.fx.Interpreter.run_node(self, node)

    # Asked only for its domain, which nobody then reads.
    unparsed = property(lambda _function: SimpleNamespace(domain=""))
    with (
        mock.patch.object(interpreter, "run_node", run_node),
        mock.patch.object(values.TracedOnnxFunction, "function_ir", unparsed),
    ):
        yield
