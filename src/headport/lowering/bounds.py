"""How far a lowered INT8 head may be from the float product with its rounded weight.

Written from what the kernel does to its activations, so that a fault in the lowering, a kernel
that saturates, or other session options are told from rounding.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.certificate import round_activations, rounds_in_graph
from headport.head_parts import find_head
from headport.ledger import find_tensor, head_weight, read_tensor
from headport.lowering.packed import ROW_BLOCK
from headport.static_rounding import is_static

__all__ = ["activation_errors", "head_bound"]

Float64 = npt.NDArray[np.float64]

_UNIT_ROUNDOFF = 2.0**-24  # of float32
_UNDERFLOW = 2.0**-90
_LARGEST_ZERO_POINT = {"int8": 128, "int8-row": 128, "int4": 15}  # of the kernel's unsigned weights
_CHUNK_ELEMENTS = 1 << 22

# Largest |δ| of an activation whose block has the largest magnitude amax, in units of amax.
# rounded: half a step of amax / 127. residual: the rest is at most half such a step, and is
# itself rounded with step (amax / 254) / 127, of which half is lost.
_LOST = {"rounded": 1 / (2 * 127), "residual": 1 / (4 * 127**2), "exact": 0.0}


def activation_errors(hidden_states: Float64, block: int, activations: str) -> Float64:
    """Largest rounding error of an activation, per block.

    Args:
        hidden_states: x, shape [N, H].
        block: Activations that share a scale.
        activations: `residual`, `rounded` or `exact`.

    Returns:
        Shape [N, ceil(H / block)], in units of x.
    """
    N, H = hidden_states.shape
    count = -(-H // block)
    padded = np.pad(np.abs(hidden_states), ((0, 0), (0, count * block - H)))
    largest: Float64 = padded.reshape(N, count, block).max(axis=2)
    return largest * _LOST[activations]


def head_bound(
    portable: Bundle, name: str, hidden_states: Float64, activations: str | None = None
) -> Float64:
    """Largest |Δlogit| between a lowered INT8 head and its portable form.

    With e[n, k] the error of an activation in block k, u = 2⁻²⁴, K blocks and Ŵ = S · Q,

        |scale| · ( Σ_k e[n, k] Σ_{h in k} |Ŵ[v, h]|
                    + u (8 √H + 32) Σ_h |x[n, h]| |Ŵ[v, h]|
                    + u (2 K + 8) Σ_k Z |S[v, k]| Σ_{h in k} |x[n, h]| )

    The second term is the rounding of both float32 sums (probabilistic, λ = 4, Higham and Mary
    2019, doi:10.1137/18M1226312). The third is the kernel's zero point, Z at most 128 for 8 bits
    and 15 for 4: it adds up products with Q + Z and takes Z S Σ x off again, block by block. What
    is more, 2⁻⁹⁰ for what falls below
    float32's normal range. A softcap enlarges nothing.

    Args:
        portable: The bundle before lowering.
        name: The head, or the part of one; its weight is stored as integers.
        hidden_states: x, what its own graph is given, shape [N, H].
        activations: What the lowered head does to them; None: what it was quantised for.

    Returns:
        Shape [N, V], logits.
    """
    manifest = portable.manifest
    head = find_head(manifest, name)
    quantization = head.quantization
    assert quantization is not None
    block = quantization.block or ROW_BLOCK
    entry, initializer = head_weight(manifest, head)
    weight = read_tensor(portable, entry)
    stem = initializer.rsplit(".", 1)[0]
    scale = read_tensor(portable, find_tensor(manifest, head.graph, f"{stem}.scale"))
    V, H = weight.shape
    count = -(-H // block)
    if scale.ndim == 1:  # of a row; the kernel gets it for each of its blocks
        scale = np.broadcast_to(scale[:, None], (V, count))
    zero = np.zeros((V, count), np.int8)
    if not quantization.symmetric:
        zero = read_tensor(portable, find_tensor(manifest, head.graph, f"{stem}.zero"))
    offset = _LARGEST_ZERO_POINT[quantization.format]
    activations = activations or quantization.activations
    if is_static(head):
        # Both graphs round by themselves, to numbers of hardly another size.
        activations = "exact"
    if rounds_in_graph(head):
        # Both graphs round by themselves, and the kernel leaves what is rounded as it is.
        hidden_states = round_activations(hidden_states, block).astype(np.float64)
        activations = "exact"
    size = np.abs(hidden_states)
    lost = activation_errors(size, block, activations)
    block_size = np.add.reduceat(size, np.arange(0, H, block), axis=1)
    bound = np.empty((len(size), V))
    step = max(1, _CHUNK_ELEMENTS // H)
    for start in range(0, V, step):
        rows = slice(start, min(start + step, V))
        S = np.abs(scale[rows].astype(np.float64))  # of INT4 they may be negative
        whole = weight[rows].astype(np.float64) - np.repeat(zero[rows], block, axis=1)[:, :H]
        magnitude = np.abs(whole) * np.repeat(S, block, axis=1)[:, :H]
        per_block = np.add.reduceat(magnitude, np.arange(0, H, block), axis=1)
        sums = (8 * np.sqrt(H) + 32) * (size @ magnitude.T)
        zero_point = (2 * count + 8) * (block_size @ (offset * S).T)
        bound[:, rows] = lost @ per_block.T + _UNIT_ROUNDOFF * (sums + zero_point)
    return (bound + _UNDERFLOW) * abs(head.scale)
