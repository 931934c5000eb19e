"""Lowered products against the stored matrices they were made from, each and all together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import ParityError
from headport.graphs import load_graphs
from headport.kernels import OPTION
from headport.ledger import find_tensor, read_tensor
from headport.lowering.matrices import find_products
from headport.lowering.own_fusion_check import FusionCheck, check_fusions
from headport.lowering.product_check import ExpectedProduct, ProductCheck, check_products
from headport.lowering.product_kernels import kernel_of
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
_LIMIT_OWN = 0.01  # with headport's own kernels, which keep 16 bits


@dataclass(frozen=True)
class ProductParity:
    """What lowering the products changed."""

    check: ProductCheck
    hidden_states_change: float  # ‖Δ‖ / ‖hidden states‖ on a prompt, against unlowered products
    hidden_states_limit: float
    fusions: FusionCheck

    def __bool__(self) -> bool:
        return bool(self.check) and self.hidden_states_change <= self.hidden_states_limit


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
    limit = _LIMIT_OWN if OPTION in lowered.manifest.session_options else _LIMIT
    change = hidden_states_change(unlowered, lowered, settings)
    found = ProductParity(check, change, limit, fusions)
    if not found:
        raise ParityError(
            f"the lowered products move hidden states by {found.hidden_states_change:.2g} of "
            f"their size, {limit:g} is accepted; nothing was written"
        )
    return found


def hidden_states_change(
    before: Bundle, after: Bundle, settings: SessionSettings | None = None
) -> float:
    """‖Δ‖ / ‖hidden states‖ on a prompt of random tokens; infinite where they are not finite."""
    was, now = (_hidden_states(bundle, settings) for bundle in (before, after))
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
