"""The bound behind the exact INT8 head, in NumPy: what is stored with it and what it allows for.

With W the original weight, Ŵ its rounded form, E = W - Ŵ, x a hidden state and a_v the product the
kernel gives, and writing _k for the part of a row that belongs to block k,

    W_v·x + b_v  ≤  a_v + Σ_k (‖E_vk‖ + D_vk) ‖x_k‖ + c_v  =  U_v

by Cauchy and Schwarz in each block. D is all that the kernel is allowed to be wrong by:

    |a_v - (Ŵ_v·x + b_v)|  ≤  Σ_k D_vk ‖x_k‖ + c_v

docs/exact-head.md derives every constant. The matrix ‖E‖ + D is stored, rounded up.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headport.manifest import Head

__all__ = [
    "LARGEST_NORM",
    "TANH_ERROR",
    "Bound",
    "activation_share",
    "block_norms",
    "bound_matrix",
    "constant_slack",
    "kernel_allowance",
    "round_activations",
    "rounds_in_graph",
]

Float64 = npt.NDArray[np.float64]
Float32 = npt.NDArray[np.float32]

Bound = Literal["row", "block"]

_UNIT = 2.0**-24  # unit roundoff of float32
# Absolute error of products that fall below float32's normal numbers, flushed to zero or not:
# fewer than 2^13 of them per logit, each at most 2^-126 times an integer below 2^23.
_UNDERFLOW = 2.0**-90
# ‖x_k‖ is computed from squares, which vanish below 2^-63; a block of 256 loses less than this.
_NORM_UNDERFLOW = 2.0**-58
# Hidden states of this norm or more are not certified, so that nothing can overflow.
LARGEST_NORM = 2.0**60
TANH_ERROR = 2.0**-19  # absolute, of ONNX Runtime's float32 Tanh; measured 3.3e-7


def block_norms(rows: npt.NDArray[Any], block: int) -> Float64:
    """Euclidean norm of each block along the last axis: [N, H] → [N, ceil(H / block)] float64."""
    squares = np.square(rows.astype(np.float64))
    starts = np.arange(0, rows.shape[1], block)
    norms: Float64 = np.sqrt(np.add.reduceat(squares, starts, axis=1))
    return norms


def activation_share(block: int, activations: str) -> float:
    """Largest norm of what the kernel's input loses by rounding, in units of ‖x_k‖ ≥ amax_k.

    rounded: half a step amax / 127 of each activation. residual: the rest is at most half such a
    step and is rounded with a step 254 times finer.
    """
    lost = {"residual": 1 / (4 * 127**2), "rounded": 1 / (2 * 127), "exact": 0.0}[activations]
    return float(lost * np.sqrt(block) * (1 + 2.0**-10))


def round_activations(hidden_states: npt.NDArray[Any], block: int) -> Float32:
    """x₁ [N, H] float32 as the graph computes it: INT8 multiples of max|x_k| / 127."""
    x = hidden_states.astype(np.float32)
    starts = np.arange(0, x.shape[1], block)
    largest = np.maximum.reduceat(np.abs(x), starts, axis=1)
    step = largest / np.float32(127)
    safe = np.where(step == 0, np.float32(1), step)
    each = np.repeat(safe, block, axis=1)[:, : x.shape[1]]
    rounded: Float32 = np.round(x / each) * each
    return rounded


def rounds_in_graph(head: Head) -> bool:
    """Whether a head's own graph rounds its hidden states, so that every kernel gets the same."""
    certified = head.candidates is not None and head.candidates.certified
    return (
        certified and head.quantization is not None and head.quantization.activations == "rounded"
    )


def kernel_allowance(
    weight_norms: Float64, scale: npt.NDArray[Any], block: int, hidden_size: int, activations: str
) -> Float64:
    """D: how far the kernel may be from Ŵ_v·x + b_v, per unit of ‖x_k‖.

    It covers both forms the graph can take, with sums in any order: float32 products with the
    dequantised weight, and exact integer dot products per block that are scaled, added up, and
    freed from the zero point 128 in float32.

    Args:
        weight_norms: ‖Ŵ_vk‖, shape [V, K].
        scale: S, shape [V, K].
        block: Weights that share a scale.
        hidden_size: H.
        activations: `residual`, `exact`, or `rounded`: the kernel is given x₁ and is held to
            Ŵ_v·x₁ + b_v; what x₁ lost has columns of its own, see `bound_matrix`.

    Returns:
        Shape [V, K].
    """
    count = scale.shape[1]
    share = activation_share(block, activations)
    floats = _UNIT * (hidden_size + 3 * count + 64)
    integers = _UNIT * (2 * count + 64) * 512 * np.sqrt(block)
    if activations == "rounded":
        # ‖x₁‖ ≤ (1 + share) ‖x‖ enters the kernel, which itself rounds nothing.
        floats, integers, share = floats * (1 + share), integers * (1 + share), 0.0
    allowance: Float64 = weight_norms * (share + floats) + scale.astype(np.float64) * integers
    return allowance


def constant_slack(columns: Float64, bias: Float64 | None, hidden_size: int, count: int) -> Float64:
    """c: what does not shrink with x, [V]: underflow, and the bias, first or last in the sum.

    Args:
        columns: What multiplies the norms, shape [V, C].
        bias: b, shape [V], or None.
        hidden_size: H.
        count: K.
    """
    slack: Float64 = _UNDERFLOW + _NORM_UNDERFLOW * columns.sum(axis=1)
    if bias is None:
        return slack
    return slack + _UNIT * (hidden_size + 3 * count + 64) * np.abs(bias)


def bound_matrix(
    error_norms: Float64,
    weight_norms: Float64,
    scale: npt.NDArray[Any],
    bias: Float64 | None,
    *,
    block: int,
    hidden_size: int,
    activations: str,
    bound: Bound,
) -> Float32:
    """P, so that P · (‖x_1‖ … ‖x_K‖, 1) bounds the error of every logit before scale and softcap.

    Args:
        error_norms: ‖E_vk‖, shape [V, K].
        weight_norms: ‖Ŵ_vk‖, shape [V, K].
        scale: S, shape [V, K].
        bias: b, shape [V], or None.
        block: Weights that share a scale.
        hidden_size: H.
        activations: As for `kernel_allowance`. `rounded` adds columns that multiply ‖r_k‖,
            r = x - x₁.
        bound: `block` keeps K columns; `row` folds them into one that multiplies ‖x‖.

    Returns:
        Shape [V, C + 1], float32, rounded up; the last column multiplies 1.
    """
    allowance = kernel_allowance(weight_norms, scale, block, hidden_size, activations)
    parts = [error_norms + allowance]
    if activations == "rounded":
        parts.append(weight_norms)
    if bound == "row":
        parts = [np.sqrt(np.square(part).sum(axis=1, keepdims=True)) for part in parts]
    columns = np.concatenate(parts, axis=1)
    slack = constant_slack(columns, bias, hidden_size, scale.shape[1])
    full = np.concatenate([columns, slack[:, None]], axis=1)
    # The graph's own arithmetic: norms over H squares, then the sum of C + 1 products.
    own = 1 + 4 * _UNIT * (hidden_size / 2 + full.shape[1] + 16)
    return _round_up(full * own)


def _round_up(values: Float64) -> Float32:
    return np.nextafter(values.astype(np.float32), np.float32(np.inf))
