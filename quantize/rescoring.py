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
from headport.manifest import CandidateForm, Head, Manifest, Tensor
from headport.quantize.candidates_pass import CandidateSettings, OriginalWeight, add_candidates
from headport.quantize.certificate import certificate_of, equal_rows

__all__ = ["Rescoring", "RescoringBytes", "add_rescoring", "bytes_of"]

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


@dataclass(frozen=True)
class RescoringBytes:
    """What candidates cost besides the quantised weight, in bytes."""

    certificate: int  # bounds, and the table of equal rows where there are any
    original: int  # the original weight on disk
    original_shared: bool  # it is the input embedding, which is there anyway
    resident: int  # what the head holds in memory until the full product is first needed
    read_per_token: int  # by one row of the head: quantised weight, bounds and M original rows
    read_per_fallback: int  # more of it by one row that takes the full product


def bytes_of(manifest: Manifest, head: Head) -> RescoringBytes:
    """Sizes of a written head that gives candidates."""
    form = head.candidates
    assert form is not None
    read = {
        name.removeprefix(f"{head.graph}:"): tensor.length
        for tensor in manifest.tensors
        for name in tensor.consumers
        if name.startswith(f"{head.graph}:")
    }
    original = next(tensor for tensor in manifest.tensors if tensor.name == form.original)
    resident = sum(read.values())
    certificate = sum(size for name, size in read.items() if name.startswith("certificate."))
    rows = form.count * (original.length // original.shape[0])
    return RescoringBytes(
        certificate=certificate,
        original=original.length,
        original_shared=form.original_tied,
        resident=resident,
        read_per_token=resident - original.length + rows,
        read_per_fallback=original.length,
    )


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
    assert quantization is not None
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
        assert quantization.block is not None
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
    block = quantization.block or weight.shape[1]
    settings = CandidateSettings(count, block, quantization.activations, certificate, equals)
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
