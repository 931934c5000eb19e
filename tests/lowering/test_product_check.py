"""The bound of a product: kept by what computes right, and exceeded by one wrong weight."""

from __future__ import annotations

import numpy as np
import pytest

from headport.errors import ParityError
from headport.lowering.product_check import (
    ExpectedProduct,
    _compare,
    _same_names,
    _unrounded_rows,
)
from headport.lowering.product_runs import Observed

N, K, BLOCK = 11, 53, 16


def _expected(weight: np.ndarray, activations: str) -> ExpectedProduct:
    return ExpectedProduct((N, K), lambda rows: weight[rows], BLOCK, activations)


def _weight() -> np.ndarray:
    return np.random.default_rng(0).integers(-127, 128, (N, K)) * 2.0**-9


LARGEST = pytest.mark.parametrize("largest", [127, 32767], ids=["8 bits", "16 bits"])


@LARGEST
@pytest.mark.parametrize("K", [1, 16, 53, 61, 128, 1500])
def test_rows_that_no_kernel_rounds(K: int, largest: int) -> None:
    rows = _unrounded_rows(K, largest).astype(np.float64)
    for block in (16, 32, 64, 128, 256):
        for start in range(0, K, block):
            part = rows[:, start : start + block]
            step = np.abs(part).max(axis=1, keepdims=True) / largest
            used = step[:, 0] > 0  # slices of long rows leave whole blocks empty
            part, step = part[used], step[used]
            assert used[:4].all() and (part / step == np.rint(part / step)).all()


@LARGEST
def test_float32_products_keep_the_exact_bound_and_one_step_exceeds_it(largest: int) -> None:
    weight, x = _weight(), _unrounded_rows(K, largest)
    y = (x @ weight.T.astype(np.float32)).astype(np.float64)
    expected = {"m": _expected(weight, "rounded")}
    share, values, _, _ = _compare([Observed("m", x.astype(float), y)], expected, is_exact=True)
    assert share < 0.2 and values == y.size
    weight = weight.copy()
    weight[5, 20] += 2.0**-9
    with pytest.raises(ParityError, match=r"m as stored: 1 of 11 .* output 5 "):
        _compare(
            [Observed("m", x.astype(float), y)],
            {"m": _expected(weight, "rounded")},
            is_exact=True,
        )


def test_rounded_activations_keep_the_real_bound_and_coarser_ones_exceed_it() -> None:
    weight = _weight()
    x = np.random.default_rng(1).normal(size=(6, K))

    def rounded(steps: int) -> np.ndarray:
        made = x.copy()
        for start in range(0, K, BLOCK):
            part = made[:, start : start + BLOCK]
            step = np.abs(part).max(axis=1, keepdims=True) / steps
            part[:] = np.rint(part / step) * step
        return made @ weight.T

    expected = {"m": _expected(weight, "rounded")}
    share, *_ = _compare([Observed("m", x, rounded(127))], expected, is_exact=False)
    assert 0.1 < share <= 1
    with pytest.raises(ParityError, match="more than rounding explains"):
        _compare([Observed("m", x, rounded(15))], expected, is_exact=False)
    with pytest.raises(ParityError, match="more than rounding explains"):
        _compare(
            [Observed("m", x, rounded(127))], {"m": _expected(weight, "exact")}, is_exact=False
        )


def test_values_that_are_no_numbers_and_other_shapes_are_refused() -> None:
    weight, x = _weight(), np.ones((2, K))
    expected = {"m": _expected(weight, "exact")}
    y = x @ weight.T
    y[1, 3] = np.nan
    with pytest.raises(ParityError, match="output 3 "):
        _compare([Observed("m", x, y)], expected, is_exact=False)
    with pytest.raises(ParityError, match="outputs of shape"):
        _compare([Observed("m", x, y[:, :4])], expected, is_exact=False)


def test_products_are_counted() -> None:
    weight = _weight()
    one = Observed("m", np.ones((1, K)), np.ones((1, N)))
    _same_names([one], {"m": _expected(weight, "exact")})
    with pytest.raises(ParityError, match=r"m \(2 products instead of 1\)"):
        _same_names([one, one], {"m": _expected(weight, "exact")})
    with pytest.raises(ParityError, match=r"m \(0 products instead of 1\)"):
        _same_names([], {"m": _expected(weight, "exact")})
    with pytest.raises(ParityError, match=r"m \(1 products instead of 0\)"):
        _same_names([one], {})


@LARGEST
@pytest.mark.parametrize("K", [2048, 4096])
def test_one_step_exceeds_the_bound_of_a_long_product(K: int, largest: int) -> None:
    weight = np.random.default_rng(0).integers(-127, 128, (8, K)) * 2.0**-9
    x = _unrounded_rows(K, largest)
    observed = [Observed("m", x.astype(float), (x @ weight.T.astype(np.float32)).astype(float))]
    size = (8, K)
    honest = ExpectedProduct(size, lambda rows: weight[rows], 64, "rounded")
    assert _compare(observed, {"m": honest}, is_exact=True)[0] < 0.5
    caught = 0
    for h in np.random.default_rng(3).integers(0, K, 24):
        wrong = weight.copy()
        wrong[5, h] += 2.0**-9
        changed = ExpectedProduct(size, wrong.__getitem__, 64, "rounded")
        try:
            _compare(observed, {"m": changed}, is_exact=True)
        except ParityError:
            caught += 1
    assert caught == 24
