"""What is stored for the proof, by hand-made numbers."""

from __future__ import annotations

import numpy as np
import pytest

from headport.certificate import activation_share, block_norms, bound_matrix, kernel_allowance
from headport.errors import QuantizeError
from headport.quantize.certificate import certificate_of, equal_rows

# One row, blocks of 16: errors of 3 and 4 in the first block, 12 in the second, which is short.
WEIGHT = np.zeros((1, 20), np.float32)
WEIGHT[0, [0, 1, 17]] = 3.0, 4.0, 12.0
STORED = {"int8": np.zeros((1, 20), np.int8), "scale": np.ones((1, 2), np.float32)}


def _bounds(bound: str, activations: str = "exact") -> np.ndarray:
    made = certificate_of(WEIGHT, STORED, None, block=16, activations=activations, bound=bound)
    assert 13.0 <= made.largest_norm < 13.0001
    return made.bounds


def test_norms_are_taken_block_by_block_and_rounded_up() -> None:
    assert block_norms(WEIGHT, 16).tolist() == [[5.0, 12.0]]
    [[first, second, constant]] = _bounds("block").tolist()
    assert 5.0 < first < 5.02 and 12.0 < second < 12.02 and 0 < constant < 1e-15


def test_a_bound_per_row_folds_the_blocks_by_their_norm() -> None:
    [[only, constant]] = _bounds("row").tolist()
    assert 13.0 < only < 13.03 and 0 < constant < 1e-15


def test_rounded_activations_have_columns_of_their_own() -> None:
    assert _bounds("block", "rounded").shape == (1, 5)
    assert _bounds("row", "rounded").shape == (1, 3)


def test_the_kernels_share_grows_with_what_it_rounds() -> None:
    norms, scale = np.array([[100.0]]), np.array([[0.5]])
    allowed = {
        kind: float(kernel_allowance(norms, scale, 64, 64, kind)[0, 0])
        for kind in ("exact", "residual")
    }
    assert allowed["residual"] - allowed["exact"] == pytest.approx(100 * 8 / (4 * 127**2), rel=2e-3)
    assert activation_share(64, "rounded") == pytest.approx(8 / 254, rel=2e-3)


def test_a_bias_widens_the_constant() -> None:
    norms = np.ones((2, 1))
    bounds = bound_matrix(
        norms,
        norms,
        np.ones((2, 1)),
        np.array([0.0, -1e6]),
        block=16,
        hidden_size=16,
        activations="exact",
        bound="block",
    )
    assert bounds[0, 1] < 1e-15 < 1.0 < bounds[1, 1] < 10.0


@pytest.mark.parametrize("where", ["weight", "bias"])
def test_what_could_overflow_is_not_certified(where: str) -> None:
    weight, bias = WEIGHT.copy(), np.zeros(1, np.float32)
    (weight[0] if where == "weight" else bias)[0] = 2.0**51
    with pytest.raises(QuantizeError, match="below 2\\^50 were expected"):
        certificate_of(weight, STORED, bias, block=16, activations="exact", bound="row")


def test_equal_rows_are_known_by_their_lowest_id() -> None:
    weight = np.array([[1, 2], [3, 4], [1, 2], [1, 2]], np.float32)
    found = equal_rows(weight, None)
    assert found is not None and found.tolist() == [0, 1, 0, 0]
    bias = np.array([0, 0, 5, 0], np.float32)
    found = equal_rows(weight, bias)
    assert found is not None and found.tolist() == [0, 1, 2, 0]
    assert equal_rows(weight[:2], None) is None
