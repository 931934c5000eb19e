"""Storage formats: sizes, row errors, and what float16 cannot hold."""

from __future__ import annotations

import numpy as np
import pytest

from headport.errors import QuantizeError
from headport.quantize import formats
from headport.quantize.formats import FORMATS


def _weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_int8_stores_one_byte_per_weight_and_four_per_block() -> None:
    stored = FORMATS["int8"].store(_weight(5, 40), 16)
    assert list(stored.tensors) == ["int8", "scale"]
    assert stored.nbytes == 5 * 40 + 5 * 3 * 4


def test_row_errors_are_relative_to_the_row() -> None:
    weight = np.zeros((3, 16), np.float32)
    weight[1, :2] = 127.0, 0.5  # 0.5 is rounded to 0
    weight[2, 0] = 1e-6
    errors = FORMATS["int8"].store(weight, 16).row_errors
    assert errors[0] == 0 and errors[2] < 1e-6
    assert errors[1] == pytest.approx(0.5 / np.hypot(127.0, 0.5))


def test_rows_are_the_same_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight(31, 61)
    whole = FORMATS["int8"].store(weight, 32)
    monkeypatch.setattr(formats, "_CHUNK_ELEMENTS", 150)  # two rows and a bit
    parts = FORMATS["int8"].store(weight, 32)
    for name, array in whole.tensors.items():
        assert (array == parts.tensors[name]).all()
    assert (whole.row_errors == parts.row_errors).all()


def test_non_finite_rows_are_named_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_CHUNK_ELEMENTS", 64)
    weight = _weight(9, 32)
    weight[7, 3] = np.nan
    with pytest.raises(QuantizeError, match="row 7;"):
        FORMATS["int8"].store(weight, 32)


def test_fp16_rounds_and_reports_lost_rows() -> None:
    weight = _weight(3, 8)
    weight[1] *= np.float32(1e-9)  # below float16's smallest number
    stored = FORMATS["fp16"].store(weight, 0)
    assert stored.tensors["fp16"].dtype == np.float16 and stored.nbytes == 3 * 8 * 2
    assert stored.row_errors[0] < 2**-11 and stored.row_errors[1] == 1.0


def test_fp16_refuses_what_it_cannot_hold() -> None:
    weight = _weight(4, 8)
    weight[2, 0] = 7e4
    with pytest.raises(QuantizeError, match=r"largest ±65504\), first in row 2"):
        FORMATS["fp16"].store(weight, 0)


def test_fp16_of_fp16_is_refused() -> None:
    with pytest.raises(QuantizeError, match="already stored as float16"):
        FORMATS["fp16"].store(_weight(2, 2).astype(np.float16), 0)
