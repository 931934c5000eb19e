"""Candidates by headport's own kernel: one node for what a head does behind its quantised product.

    TopK(upper + noise), Gather, MatMul in float64, TopK, … , Exp, ReduceSum, Log
      →  RankedCandidates(x, upper, noise, logits, W, terms, b?, firsts?)

In a decode step the fifty nodes of such a head take a quarter of the time of its product. What is
computed is what `headport.quantize.candidates_pass` writes, with the same limits of error.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from headport.kernels import CANDIDATES, DOMAIN, VERSION
from headport.lowering.emit import made_by
from headport.lowering.match import Match
from headport.manifest import Head

__all__ = ["adopt_candidates"]

_WAS = "TopK + Gather + MatMul"
# Of the graph, in the operator's order.
_OUTPUTS = ("candidate_ids", "candidate_logits", "logsumexp", "certified_k", "cut", "error")
_INPUTS = ("upper_bounds", "noise", "quantised_logits")
_BIAS, _FIRSTS = "candidates.bias", "certificate.equal_rows"


def adopt_candidates(model: ir.Model, head: Head, name: str) -> list[Match]:
    """Give a head that ranks candidates the own kernel."""
    if head.candidates is None:
        return []
    graph = model.graph
    found = {value.name or "": value for value in (*graph.inputs, *graph.outputs)}
    weight, error = _original(graph, head), _error(found.get("error"))
    fault = ""
    if weight is None or graph.inputs[0].dtype != ir.DataType.FLOAT:
        fault = "no hidden states and original weight in float32"
    elif error is None or not {*_OUTPUTS, *_INPUTS} <= found.keys():
        fault = "candidates of another form; quantise it again"
    if fault:
        return [Match(f"candidates of head {name}", _WAS, None, f"it has {fault}")]
    terms = np.array([head.scale, head.softcap or 0.0, *(error or ())], np.float64)
    given = ir.val("candidates.terms", const_value=ir.tensor(terms, name="candidates.terms"))
    graph.register_initializer(given)
    optional = [graph.initializers.get(each) for each in (_BIAS, _FIRSTS)]
    outputs = [found[each] for each in _OUTPUTS]
    node = ir.node(
        CANDIDATES,
        [
            graph.inputs[0],
            *(found[each] for each in _INPUTS),
            weight,
            given,
            *optional,
        ],
        {"count": head.candidates.count, "certified": int(head.candidates.certified)},
        domain=DOMAIN,
        num_outputs=len(outputs),
        name=f"candidates.{CANDIDATES}",
    )
    graph.append(node)
    for old, new in zip(outputs, node.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
        graph.outputs[graph.outputs.index(old)] = new
        new.name, old.name = old.name, f"{old.name}.replaced"
    common_passes.RemoveUnusedNodesPass()(model)
    model.opset_imports[DOMAIN] = VERSION
    return [Match(f"candidates of head {name}", _WAS, CANDIDATES)]


def _original(graph: ir.Graph, head: Head) -> ir.Value | None:
    """The weight that candidates are scored with: what rows are gathered from."""
    x = graph.inputs[0]
    width = x.shape[1] if x.shape is not None and len(x.shape) == 2 else None
    for node in graph:
        data = node.inputs[0] if node.op_type == "Gather" else None
        if data is None or not data.is_initializer() or data.dtype != ir.DataType.FLOAT:
            continue
        if data.shape is not None and list(data.shape) == [head.vocab_size, width]:
            return data
    return None


def _error(value: ir.Value | None) -> tuple[float, float] | None:
    """Slope and rest of error = ‖x‖ · slope + rest."""
    summed = made_by(_input(made_by(value, "Squeeze"), 0), "Add")
    product = made_by(_input(summed, 0), "Mul")
    slope, rest = _number(_input(product, 1)), _number(_input(summed, 1))
    return None if slope is None or rest is None else (slope, rest)


def _input(node: ir.Node | None, place: int) -> ir.Value | None:
    return node.inputs[place] if node is not None and place < len(node.inputs) else None


def _number(value: ir.Value | None) -> float | None:
    constant = value.const_value if value is not None else None
    return float(constant.numpy()) if constant is not None and constant.size == 1 else None
