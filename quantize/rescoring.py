"""Adding rescoring, and a certificate, to a head whose weight has just been quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.bundle import Bundle
from headport.certificate import Bound
from headport.errors import QuantizeError
from headport.graphs import load_graphs
from headport.ledger import read_tensor
from headport.manifest import CandidateForm, Head, Tensor
from headport.quantize.candidates_pass import CandidateSettings, OriginalWeight, add_candidates
from headport.quantize.certificate import certificate_of, equal_rows

__all__ = ["Rescoring", "add_rescoring"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Rescoring:
    """What is asked for, and what the head's weight was and is."""

    count: int  # M
    bound: Bound | None  # None: no certificate
    original: Tensor  # ledger entry of W in the source bundle
    initializer: str  # W's name inside the head's graph
    stored: Mapping[str, Array]  # `int8`, `scale`
    bias: npt.NDArray[np.float32] | None


def add_rescoring(
    source: Bundle, model: ir.Model, head: Head, asked: Rescoring
) -> tuple[CandidateForm, ir.Model]:
    """Turn a quantised head's graph into one that gives candidates.

    Args:
        source: The bundle before quantising.
        model: The head's graph with its weight quantised; changed in place.
        head: Its manifest entry, with the quantisation.
        asked: Candidates, bound and weights.

    Returns:
        The manifest's entry, and the graph that gives all logits with the original weight.

    Raises:
        QuantizeError: If the scale is not positive, the vocabulary has one row, or the weights
            are too large to be certified.
    """
    quantization = head.quantization
    assert quantization is not None and quantization.block is not None
    if not head.scale > 0:
        raise QuantizeError(
            f"--rescore: a head with scale > 0 was expected, {head.scale:g} found; "
            "the order of logits would be turned round"
        )
    weight = read_tensor(source, asked.original)
    count = min(asked.count, len(weight) - 1)
    if count < 1:
        raise QuantizeError("--rescore: a head with two rows or more was expected")
    certificate, equals = None, None
    if asked.bound is not None:
        certificate = certificate_of(
            weight,
            asked.stored,
            asked.bias,
            block=quantization.block,
            activations=quantization.activations,
            bound=asked.bound,
        )
        equals = equal_rows(weight, asked.bias)
    full = load_graphs(source)[head.graph]
    full.graph.name = f"{head.graph}.full"
    original = full.graph.initializers[asked.initializer].const_value
    assert original is not None
    settings = CandidateSettings(
        count, quantization.block, quantization.activations, certificate, equals
    )
    add_candidates(model, _product(model), head, OriginalWeight(original, asked.bias), settings)
    form = CandidateForm(
        count=count,
        certified=certificate is not None,
        bound=asked.bound,
        full=full.graph.name,
        original=asked.original.name,
        original_tied=source.manifest.heads["lm"].tied,
    )
    return form, full


def _product(model: ir.Model) -> ir.Node:
    for node in model.graph:
        value = node.inputs[1] if node.op_type == "Gemm" else None
        producer = value.producer() if value is not None else None
        if producer is not None and producer.op_type == "DequantizeLinear":
            return node
    raise AssertionError("store_head_weight leaves DequantizeLinear + Gemm")
