"""From a traced program to a small ONNX graph: translated, then optimised and fused."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    DeduplicateInitializersPass,
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveUnusedNodesPass,
)
from onnxscript import rewriter
from onnxscript.optimizer import fold_constants
from onnxscript.rewriter.onnx_fusions import fuse

from headport.errors import ExportError
from headport.export.checkpoint import quiet_libraries
from headport.export.functions import OPSET
from headport.export.lighten import known_results_reused, skip_decompositions

__all__ = ["optimize_graph", "translate"]

# Operators the exporter has no translation for → what they mean for the model.
_UNTRANSLATED = {
    "grouped_mm": "experts are computed by the model itself instead of through transformers' "
    "experts interface, and no adapter is known for them; this architecture is refused"
}


def translate(
    program: torch.export.ExportedProgram, inputs: list[str], outputs: list[str]
) -> ir.Model:
    """Translate a program, operator by operator, into ONNX.

    Args:
        program: Changed in place.
        inputs: Names of its inputs, in order.
        outputs: Names of its outputs, in order.

    Raises:
        ExportError: If an operator has no translation, where what it means is known.
        torch.onnx.OnnxExporterError: If an operator has no translation.
    """
    for node in program.graph.nodes:
        for part, reason in _UNTRANSLATED.items():
            if part in str(node.target):
                raise ExportError(reason)
    if skip_decompositions(program):
        try:
            return _export(program, inputs, outputs)
        except torch.onnx.OnnxExporterError:
            del program.run_decompositions  # the class's own method again
    return _export(program, inputs, outputs)


def _export(
    program: torch.export.ExportedProgram, inputs: list[str], outputs: list[str]
) -> ir.Model:
    with torch.no_grad(), quiet_libraries(), known_results_reused():
        exported = torch.onnx.export(
            program,
            (),
            dynamo=True,
            opset_version=OPSET,
            input_names=inputs,
            output_names=outputs,
            optimize=False,
            verbose=False,
        )
    assert exported is not None
    return exported.model


# The optimiser's own rules but those with several ends, which search the whole graph at each start:
# that grows with the square of the layers. There is one, which makes two slices one split; a graph
# is right without it, and the halves of a rotation become one operator anyway.
_RULES = tuple(
    rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule._target_pattern.has_single_output_node
)


def optimize_graph(model: ir.Model) -> None:
    """Merge, fold and fuse a translated graph, in place."""
    InlinePass()(model)
    # The exporter writes shape arithmetic once per layer; merged first, it is worked through once.
    CommonSubexpressionEliminationPass()(model)
    fold_constants(model, onnx_shape_inference=True)
    rewriter.rewrite(model, _RULES)
    _tidy(model)
    fold_constants(model)  # what the first round uncovered
    _tidy(model)
    fuse(model)


def _tidy(model: ir.Model) -> None:
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    DeduplicateInitializersPass()(model)
    CommonSubexpressionEliminationPass()(model)
    RemoveUnusedNodesPass()(model)
