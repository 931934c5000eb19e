"""Every product of a written backbone against float64, and how far each may be off.

Rounding of activations hides small faults, so products first run on rows that it leaves as they
are: whole numbers up to the largest that the kernel keeps, with that one in every block, times a
power of two. What is left is float32 arithmetic, which a weight that is off by one step exceeds.
Then they run on what reaches them in a prompt, where the bound holds what rounding may do to those
activations, block by block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import ParityError
from headport.kernels import OPTION
from headport.lowering.bounds import activation_errors
from headport.lowering.product_runs import Observed, run_alone, run_real
from headport.session import SessionSettings

__all__ = ["ExpectedProduct", "ProductCheck", "check_products"]

Float64 = npt.NDArray[np.float64]

_ROWS = 4
# Whole numbers that 8 bits keep, and the 16 of own kernels.
_LARGEST, _LARGEST_OWN = 127, 32767
_LONG = 1024  # inputs from which a product is also run in pieces
_SLICE = 256  # a multiple of every block
_GROUP = 16  # every block size is a multiple of it
_EXPONENTS = (0, -5, -10, 3)
_UNIT_ROUNDOFF = 2.0**-24  # of float32
_UNDERFLOW = 2.0**-90
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class ExpectedProduct:
    """What a product must multiply with, and what its kernel does besides."""

    size: tuple[int, int]  # N, K
    weight: Callable[[slice], Float64]  # rows of Ŵ → [n, K]
    block: int  # activations that are rounded together; K where none are
    activations: str  # rounded or exact
    offset: Callable[[slice], Float64] | None = None  # rows → |zero point · scale| [n, blocks]
    count: int = 1  # products that read the matrix


@dataclass(frozen=True)
class ProductCheck:
    """How far the written products are from the float64 reference."""

    products: int
    values: int  # compared
    exact_share_of_bound: float  # on rows that no kernel rounds: |Δ| / float32's bound; ≤ 1
    real_share_of_bound: float  # on a prompt's activations, which a kernel may round; ≤ 1
    real_relative_error: float  # there, max |Δ| / max |y| of the worst product
    worst: str  # that product's matrix

    def __bool__(self) -> bool:
        shares = max(self.exact_share_of_bound, self.real_share_of_bound)
        return self.products > 0 and self.values > 0 and shares <= 1


def check_products(
    bundle: Bundle,
    expected: Mapping[str, ExpectedProduct],
    settings: SessionSettings | None = None,
) -> ProductCheck:
    """Run the products of a written backbone and compare each with x Ŵᵀ in float64.

    With u = 2⁻²⁴, K inputs, e[k] the largest rounding error of an activation of block k, and S Z
    the kernel's zero point, y may differ by

        Σ_k e[k] Σ_{h in k} |Ŵ[n, h]| + u (4 √K + 8) Σ_h |x_h| |Ŵ[n, h]|
        + u (2 · blocks + 8) Σ_k |S Z| Σ_{h in k} |x_h|

    Sources as for `headport.lowering.bounds.head_bound`.

    Args:
        bundle: As it lies on disk, sealed or not.
        expected: By matrix; all that are stored in fewer bits.
        settings: Session settings.

    Raises:
        ParityError: If a matrix is not there, or a product with it differs by more.
    """
    own = OPTION in bundle.manifest.session_options
    unrounded = cache(_unrounded_rows)

    def rows(name: str, K: int) -> npt.NDArray[np.float32]:
        fine = own and (name not in expected or expected[name].activations != "rounded")
        return unrounded(K, _LARGEST_OWN if fine else _LARGEST)

    exact = run_alone(bundle, rows, settings)
    _same_names(exact, expected)
    exact_share, values, _, _ = _compare(exact, expected, is_exact=True)
    real_share, more, error, worst = _compare(run_real(bundle, settings), expected, is_exact=False)
    return ProductCheck(len(exact), values + more, exact_share, real_share, error, worst)


def _same_names(found: list[Observed], expected: Mapping[str, ExpectedProduct]) -> None:
    count = Counter(observed.name for observed in found)
    wrong = [
        f"{name} ({count[name]} products instead of {expected[name].count if known else 0})"
        for name in sorted(expected.keys() | count.keys())
        if count[name] != (expected[name].count if (known := name in expected) else 0)
    ]
    if wrong:
        raise ParityError(
            "the written backbone does not multiply with its matrices as stored: "
            f"{', '.join(wrong)}; nothing was written"
        )


def _unrounded_rows(K: int, largest: int) -> npt.NDArray[np.float32]:
    rng = np.random.Generator(np.random.Philox(key=13))
    whole = rng.integers(-largest, largest + 1, (_ROWS, K))
    whole[:, ::_GROUP] = largest * rng.choice((-1, 1), whole[:, ::_GROUP].shape)
    rows: npt.NDArray[np.float32] = np.ldexp(
        whole.astype(np.float32), np.array(_EXPONENTS, np.int32)[:, None]
    )
    if K <= _LONG:
        return rows
    # One step of one weight would drown in the rounding of a long sum.
    even, piece = np.float32(largest) * rng.choice((-1, 1), (1, K)), np.arange(K) // _SLICE
    parts = [np.where(piece == n, even, 0).astype(np.float32) for n in range(-(-K // _SLICE))]
    return np.concatenate([rows, *parts])


def _compare(
    found: Iterable[Observed], expected: Mapping[str, ExpectedProduct], *, is_exact: bool
) -> tuple[float, int, float, str]:
    share, values, largest, worst = 0.0, 0, 0.0, ""
    for observed in found:
        product = expected[observed.name]
        if observed.y.shape != (len(observed.x), product.size[0]):
            raise ParityError(
                f"matrix {observed.name}: outputs of shape "
                f"{(len(observed.x), product.size[0])} expected, {observed.y.shape} found"
            )
        error, ratio = _errors(observed, product, is_exact=is_exact)
        if not ratio.max() <= 1:
            _refuse(observed.name, error, ratio)
        share, values = max(share, float(ratio.max())), values + error.size
        relative = float(error.max() / max(np.abs(observed.y).max(), _UNDERFLOW))
        if relative >= largest:
            largest, worst = relative, observed.name
    return share, values, largest, worst


def _refuse(name: str, error: Float64, ratio: Float64) -> None:
    rows = ratio.max(axis=0)
    row = int(rows.argmax())
    raise ParityError(
        f"the written backbone does not multiply with {name} as stored: "
        f"{int((~(rows <= 1)).sum())} of {len(rows)} outputs differ by more than rounding "
        f"explains, most of all output {row} (|Δ| {error[:, row].max():.3g}, "
        f"{rows[row]:.3g} times its bound); nothing was written"
    )


def _errors(
    observed: Observed, product: ExpectedProduct, *, is_exact: bool
) -> tuple[Float64, Float64]:
    N, K = product.size
    x, size = observed.x, np.abs(observed.x)
    lost = activation_errors(size, product.block, "exact" if is_exact else product.activations)
    starts = np.arange(0, K, product.block)
    block_size = np.add.reduceat(size, starts, axis=1)
    error, ratio = np.empty((len(x), N)), np.empty((len(x), N))
    step = max(1, _CHUNK_ELEMENTS // K)
    for start in range(0, N, step):
        rows = slice(start, min(start + step, N))
        weight = product.weight(rows)
        magnitude = np.abs(weight)
        bound = lost @ np.add.reduceat(magnitude, starts, axis=1).T
        bound += _UNIT_ROUNDOFF * (4 * np.sqrt(K) + 8) * (size @ magnitude.T)
        if product.offset is not None:
            bound += _UNIT_ROUNDOFF * (2 * len(starts) + 8) * (block_size @ product.offset(rows).T)
        difference = np.abs(observed.y[:, rows] - x @ weight.T)
        error[:, rows] = difference
        ratio[:, rows] = np.where(
            np.isfinite(difference), difference / (bound + _UNDERFLOW), np.inf
        )
    return error, ratio
