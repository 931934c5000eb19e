"""Lowered products against the stored matrices they were made from, each and all together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.bundle import Bundle
from headport.errors import ParityError
from headport.graphs import load_graphs
from headport.kernels import ACTIVATION_BITS, FINE, OPTION
from headport.ledger import find_tensor, read_tensor
from headport.lowering.emit import attribute
from headport.lowering.matrices import find_products
from headport.lowering.own_fusion_check import FusionCheck, check_fusions
from headport.lowering.product_check import ExpectedProduct, ProductCheck, check_products
from headport.lowering.product_kernels import kernel_of
from headport.lowering.product_runs import run_prompt
from headport.manifest import BackboneQuantization, StoredMatrix
from headport.runner import open_runner
from headport.session import SessionSettings

__all__ = ["ProductParity", "check_product_parity", "hidden_states_change"]

Float64 = npt.NDArray[np.float64]

_ZERO_POINT = {"int8": 128, "int4": 8}  # of the operator's unsigned weights
_TOKENS = 24
# Rounding activations block by block moves hidden states by some percent; a kernel that saturates
# or reads another block moves them by about themselves.
_LIMIT = 0.25
_LIMIT_FINE = 0.01  # with own kernels that keep 16 bits


@dataclass(frozen=True)
class ProductParity:
    """What lowering the products changed."""

    check: ProductCheck
    hidden_states_change: float  # ‖Δ‖ / ‖hidden states‖ on a prompt, against unlowered products
    hidden_states_limit: float
    # The same with own kernels that round to 8 bits set to 16, as far as there are any: what is
    # wrong beside a product, such as another layer's norm, could hide behind the rounding.
    fine_change: float | None
    fusions: FusionCheck

    def __bool__(self) -> bool:
        return (
            bool(self.check)
            and self.hidden_states_change <= self.hidden_states_limit
            and (self.fine_change is None or self.fine_change <= _LIMIT_FINE)
        )


def check_product_parity(
    portable: Bundle,
    unlowered: Bundle,
    lowered: Bundle,
    settings: SessionSettings | None = None,
) -> ProductParity:
    """Compare every lowered product with float64, and the hidden states on a prompt.

    Args:
        portable: The bundle that holds the stored matrices.
        unlowered: Lowered but for its products.
        lowered: Lowered altogether.
        settings: How the lowered ones run.

    Raises:
        ParityError: If a product differs by more than its arithmetic explains, or hidden states
            by more than any rounding of activations does.
    """
    record = lowered.manifest.backbone_quantization  # what its kernels do, not what was asked for
    assert record is not None
    target = lowered.manifest.target
    graph = portable.manifest.backbone_name
    count = Counter(p.name for p in find_products(load_graphs(portable)[graph]))
    expected = {
        name: replace(
            _expected(portable, graph, name, how, _activations(record, target, how)),
            count=count[name],
        )
        for name, how in record.matrices.items()
    }
    check = check_products(lowered, expected, settings)
    fusions = check_fusions(lowered, settings)
    change = hidden_states_change(unlowered, lowered, settings)
    fine = _fine_change(unlowered, lowered, settings)
    is_fine = OPTION in lowered.manifest.session_options and fine is None
    limit = _LIMIT_FINE if is_fine else _LIMIT
    found = ProductParity(check, change, limit, fine, fusions)
    if not change <= limit:
        raise ParityError(
            f"the lowered products move hidden states by {change:.2g} of their size, {limit:g} "
            "is accepted; nothing was written"
        )
    if fine is not None and not fine <= _LIMIT_FINE:
        raise ParityError(
            f"with activations of {FINE} bits the lowered products move hidden states by "
            f"{fine:.2g} of their size, {_LIMIT_FINE:g} is accepted; nothing was written"
        )
    if not found:
        raise ParityError("no product of the written backbone was compared; nothing was written")
    return found


def _fine_change(
    unlowered: Bundle, lowered: Bundle, settings: SessionSettings | None
) -> float | None:
    """`hidden_states_change` with no activation rounded to 8 bits; None where none is."""
    was, now = (ir.load(b.path / b.manifest.backbone.file) for b in (unlowered, lowered))
    coarse = [node for node in now.graph if attribute(node, ACTIVATION_BITS, FINE) != FINE]
    if not coarse:
        return None
    for node in coarse:
        node.attributes[ACTIVATION_BITS] = ir.AttrInt64(ACTIVATION_BITS, FINE)
    before, after = (
        run_prompt(bundle, model, [_output(model)], settings)
        for bundle, model in ((unlowered, was), (lowered, now))
    )
    (expected,), (found,) = before.values(), after.values()
    return _change(expected, found)


def _output(model: ir.Model) -> ir.Value:
    return next(port for port in model.graph.outputs if port.name == "hidden_states")


def hidden_states_change(
    before: Bundle, after: Bundle, settings: SessionSettings | None = None
) -> float:
    """‖Δ‖ / ‖hidden states‖ on a prompt of random tokens; infinite where they are not finite."""
    return _change(*(_hidden_states(bundle, settings) for bundle in (before, after)))


def _change(was: Float64, now: Float64) -> float:
    change = float(np.linalg.norm(now - was) / (np.linalg.norm(was) or 1))
    return change if np.isfinite(change) else np.inf


def _activations(record: BackboneQuantization, target: str, how: StoredMatrix) -> str:
    activations = record.activations_of(how)
    kernel = kernel_of(target, how, activations)
    lowered = kernel is not None and kernel.accuracy_level is not None
    return activations if lowered else "exact"


def _expected(
    portable: Bundle, graph: str, name: str, how: StoredMatrix, activations: str
) -> ExpectedProduct:
    stored = read_tensor(portable, find_tensor(portable.manifest, graph, f"{name}.{how.format}"))
    N, K = stored.shape
    if how.block is None:
        return ExpectedProduct((N, K), lambda rows: stored[rows].astype(np.float64), K, "exact")
    block = how.block
    scale = read_tensor(portable, find_tensor(portable.manifest, graph, f"{name}.scale"))

    def weight(rows: slice) -> Float64:
        step = np.repeat(scale[rows].astype(np.float64), block, axis=1)[:, :K]
        restored: Float64 = stored[rows].astype(np.float64) * step
        return restored

    def offset(rows: slice) -> Float64:
        found: Float64 = _ZERO_POINT[how.format] * np.abs(scale[rows].astype(np.float64))
        return found

    return ExpectedProduct((N, K), weight, block, activations, offset)


def _hidden_states(bundle: Bundle, settings: SessionSettings | None) -> Float64:
    manifest = bundle.manifest
    rng = np.random.Generator(np.random.Philox(key=7))
    length = max(1, min(_TOKENS, manifest.model.max_context))
    ids = rng.integers(0, manifest.vocabulary.size, (1, length))
    runner = open_runner(bundle, settings, heads=())
    return runner.forward(runner.new_cache(1, length), ids, np.array([length])).astype(np.float64)
