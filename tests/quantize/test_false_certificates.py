"""No false certificate: adversarial heads and states through the shipped graphs, and sabotage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.hunt import CASES, HeadCase, Truth, hunt, make_heads
from headport.bundle import Bundle
from headport.certificate import bound_matrix

ROWS = 1024


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_nothing_that_is_proved_is_wrong(tmp_path: Path, case: HeadCase) -> None:
    truth, bundles = make_heads(case, tmp_path)
    for seed, bundle in enumerate(bundles):
        found = hunt(truth, bundle, ROWS, seed)
        assert found.rows == ROWS and found.false == 0
        assert found.first_proved > ROWS // 8 and found.ranks_proved > ROWS


def _rewrite(bundle: Bundle, initializer: str, change: Any) -> None:
    """Change one stored tensor in place, behind the manifest's back."""
    entry = next(t for t in bundle.manifest.tensors if f"head.lm:{initializer}" in t.consumers)
    dtype = {"float": np.float32, "int8": np.int8, "uint8": np.uint8}[entry.dtype]
    array = np.memmap(bundle.path / entry.file, dtype, "r+", entry.offset, entry.shape)
    change(array)
    array.flush()


def _halve_a_norm(array: np.ndarray) -> None:
    array[60:] /= 2


def _drop_all_but_weight_error(array: np.ndarray) -> None:
    array /= 1.2


def _swap_rows(array: np.ndarray) -> None:
    array[[70, 71]] = array[[71, 70]]


@pytest.mark.parametrize(
    ("initializer", "change"),
    [
        ("certificate.bounds", _halve_a_norm),
        ("w.int8", _swap_rows),
        ("w", _swap_rows),
        ("w.scale", _swap_rows),
    ],
    ids=["norm halved", "quantised row swapped", "original row swapped", "scales swapped"],
)
def test_tampering_is_found_by_the_check_and_by_the_hunt(
    tmp_path: Path, initializer: str, change: Any
) -> None:
    from headport.certificate_check import check_certificate
    from headport.runner import open_runner

    truth, (bundle, _) = make_heads(HeadCase(), tmp_path)
    assert check_certificate(bundle, open_runner(bundle))
    _rewrite(bundle, initializer, change)
    assert not check_certificate(bundle, open_runner(bundle))
    if initializer == "w":  # the graph scores with the swapped rows: the truth is theirs as well
        return
    assert hunt(truth, bundle, ROWS, 0).false > 0


def test_a_bound_without_its_activation_term_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headport.certificate_check import check_certificate
    from headport.runner import open_runner

    def forgetful(*arguments: Any, **given: Any) -> Any:
        bounds = bound_matrix(*arguments, **given)
        columns = (bounds.shape[1] - 1) // 2
        bounds[:, columns:-1] = 0
        return bounds

    monkeypatch.setattr("headport.quantize.certificate.bound_matrix", forgetful)
    case = HeadCase(activations="rounded")
    truth, (_, lowered) = make_heads(case, tmp_path)
    assert hunt(truth, lowered, ROWS * 4, 0).false > 0
    check = check_certificate(lowered, open_runner(lowered))
    assert not check and check.bound_share > 1


def test_the_hunt_itself_finds_a_wrong_order(tmp_path: Path) -> None:
    truth, (bundle, _) = make_heads(HeadCase(), tmp_path)
    wrong = Truth(truth.weight[::-1].copy(), None, 1.0, None)
    assert hunt(wrong, bundle, 64, 0).false > 32
