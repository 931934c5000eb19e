"""Bounds of a lowered INT8 head, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headport.lowering.bounds import activation_errors, head_bound
from headport.quantize import Options, quantize
from tests.toy_bundles import write_toy


def test_activation_errors_by_hand() -> None:
    x = np.zeros((1, 20))
    x[0, 3], x[0, 17] = -254.0, 127.0
    assert activation_errors(x, 16, "rounded")[0].tolist() == [1.0, 0.5]
    residual = activation_errors(x, 16, "residual")[0]
    assert residual[0] == pytest.approx(254 / (4 * 127**2))
    assert not activation_errors(x, 16, "exact").any()


def test_activation_errors_hold_for_numbers_rounded_that_way() -> None:
    x = np.random.default_rng(0).normal(size=(200, 32))
    step = np.abs(x).max(axis=1, keepdims=True) / 127
    first = np.rint(x / step) * step
    rest_step = np.abs(x - first).max(axis=1, keepdims=True) / 127
    rest = np.rint((x - first) / rest_step) * rest_step
    for name, rounded in (("rounded", first), ("residual", first + rest)):
        bound = activation_errors(x, 32, name)
        share = np.abs(x - rounded).max(axis=1) / bound[:, 0]
        assert 0.5 < share.max() <= 1.0 + 1e-9


def test_head_bound_by_hand(tmp_path: Path) -> None:
    weight = np.full((3, 16), 127.0, np.float32)  # scale 1, Q = 127
    source = write_toy(tmp_path / "toy", weight, scale=2.0)
    options = Options(
        bundle=source.path, output=tmp_path / "o", head="int8", block=16, activations="rounded"
    )
    bound = head_bound(quantize(options), "lm", np.eye(1, 16) * 254.0)
    assert bound.shape == (1, 3)
    # |scale| · one unit of activation error · Σ|Ŵ|, and a little float32 rounding
    assert bound[0, 0] == pytest.approx(2.0 * 1.0 * 16 * 127, rel=0.01)
    assert bound[0, 0] > 2.0 * 16 * 127
