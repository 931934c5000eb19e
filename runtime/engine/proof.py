"""That a head's weight lies in the plan as it was stored: its bytes are looked for, one by one.

A builder that widens INT8 to FP16 says nothing; the plan is then as large as before and the kernel
as slow. A plan cannot be opened without its GPU, but it is a file, and constants lie in it as they
are, by rows or by columns.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from headport.bundle import Bundle
from headport.engines import WeightProof
from headport.errors import ParityError
from headport.ledger import head_weight
from headport.manifest import Tensor

__all__ = ["check_proofs", "prove_weights"]

_WINDOW_BYTES = 64  # looked for first
_SEARCHED_BYTES = 1 << 20  # for the window that tells most
_NARROW = ("int8", "int4", "float8e4m3fn")  # what a builder could widen
_HALF_BYTES = ("int4", "uint4")  # two to a byte, the first one low


def prove_weights(bundle: Bundle, graph: str, plan: Path, *, merged: bool) -> list[WeightProof]:
    """Look for the weights of a graph's heads in its plan.

    Args:
        bundle: What the plan was built from.
        graph: The head's graph; any other has no weights to prove.
        plan: The plan's file.
        merged: The plan holds all graphs.
    """
    proofs = []
    for head in bundle.manifest.heads.values():
        if head.graph == graph or merged:
            weight, _ = head_weight(bundle.manifest, head)
            proofs.append(_prove(bundle, weight, plan))
    return proofs


def _prove(bundle: Bundle, weight: Tensor, plan: Path) -> WeightProof:
    with bundle.file(weight.file).open("rb") as stream:
        stream.seek(weight.offset)
        stored = stream.read(weight.length)
    layouts: dict[Literal["rows", "columns"], Callable[[], bytes]] = {
        "rows": lambda: stored,
        "columns": lambda: _by_columns(stored, weight),
    }
    found = next((name for name, data in layouts.items() if _holds(plan, data())), None)
    elements = math.prod(weight.shape)
    return WeightProof(
        weight=weight.name,
        dtype=weight.dtype,
        elements=elements,
        stored_bytes=weight.length,
        plan_bytes_per_element=plan.stat().st_size / elements,
        found=found is not None,
        layout=found,
    )


def _by_columns(stored: bytes, weight: Tensor) -> bytes:
    """The same numbers with the inputs first, as a builder lays a product's second factor out."""
    V, H = weight.shape
    if weight.dtype not in _HALF_BYTES:
        width = len(stored) // (V * H)
        matrix = np.frombuffer(stored, f"V{width}").reshape(V, H)
        return np.ascontiguousarray(matrix.T).tobytes()
    pairs = np.frombuffer(stored, np.uint8)
    flat = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[: V * H]
    turned = np.ascontiguousarray(flat.reshape(V, H).T).reshape(-1)
    turned = np.pad(turned, (0, turned.size % 2))
    packed: bytes = (turned[::2] | (turned[1::2] << 4)).tobytes()
    return packed


def _holds(plan: Path, stored: bytes) -> bool:
    start = _telling(stored)
    anchor = stored[start : start + _WINDOW_BYTES]
    with plan.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as held:
        at = held.find(anchor)
        while at >= 0:
            first = at - start
            if first >= 0 and held[first : first + len(stored)] == stored:
                return True
            at = held.find(anchor, at + 1)
    return False


def _telling(stored: bytes) -> int:
    """Where a window of the weight begins that is not found everywhere, as zeros are."""
    starts = range(0, max(1, min(len(stored), _SEARCHED_BYTES) - _WINDOW_BYTES), _WINDOW_BYTES)
    return max(starts, key=lambda start: len(set(stored[start : start + _WINDOW_BYTES])))


def check_proofs(proofs: list[WeightProof]) -> None:
    """Refuse a plan in which a weight is not what the bundle stores.

    Raises:
        ParityError: If integers, or FP8, are not in the plan as they were stored.
    """
    for proof in proofs:
        if proof.dtype in _NARROW and not proof.found:
            raise ParityError(
                f"the plan does not hold the {proof.dtype} weight {proof.weight} as it is stored: "
                f"{proof.plan_bytes_per_element:.3f} bytes per element, "
                f"{proof.stored_bytes / proof.elements:.3f} expected; the builder widened it"
            )
