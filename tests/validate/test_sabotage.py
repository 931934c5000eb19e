"""Every default gate is proved: a sealed but damaged bundle fails by its numbers alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headport.bundle import Bundle
from headport.errors import BundleError
from headport.selftest import run_selftest
from headport.validate.command import Options, validate_with
from headport.validate.report import Report
from tests.validate import sabotage as faults

ROWS = [
    ("tiny_llama", "tiny_bundle", faults.swap_rows),
    ("tiny_llama", "tiny_bundle", faults.flip_bit),
    ("tiny_llama", "tiny_lowered", faults.swap_rows),
    ("tiny_llama", "tiny_lowered", faults.flip_bit),
    ("tiny_phi", "phi_bundle", faults.drop_bias),
    ("tiny_cohere", "cohere_bundle", faults.drop_scale),
    ("tiny_gemma2", "gemma_bundle", faults.drop_softcap),
]
UNTOUCHED = sorted({(checkpoint, bundle) for checkpoint, bundle, _ in ROWS})


@pytest.fixture
def check(
    reference_of: Any, texts: tuple[Path, Path], request: pytest.FixtureRequest
) -> Callable[[str, Path], Report]:
    def run(checkpoint: str, bundle: Path) -> Report:
        folder: Path = request.getfixturevalue(checkpoint)
        options = Options(bundle=bundle, reference=str(folder), text=texts, greedy_tokens=4)
        return validate_with(reference_of(folder), options)

    return run


@pytest.mark.parametrize(
    ("checkpoint", "bundle", "fault"), ROWS, ids=[f"{b}-{f.__name__}" for _, b, f in ROWS]
)
def test_a_planted_fault_fails(
    checkpoint: str,
    bundle: str,
    fault: faults.Fault,
    check: Any,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    damaged = faults.sabotage(request.getfixturevalue(bundle), tmp_path / "damaged", fault)
    assert run_selftest(Bundle.open(damaged)), "checksums, ledger and self-test fit the damage"
    report = check(checkpoint, damaged)
    assert report.verdict == "failed"
    assert "max_abs_logit_error" in {g.metric for g in report.gates if g.verdict == "failed"}


def test_data_of_another_bundle_fails(check: Any, tiny_bundle: Path, tmp_path: Path) -> None:
    other = faults.sabotage(tiny_bundle, tmp_path / "other", faults.other_head)
    fault = faults.foreign_data(other)
    damaged = faults.sabotage(tiny_bundle, tmp_path / "damaged", fault)
    report = check("tiny_llama", damaged)
    assert {gate.verdict for gate in report.gates} == {"failed"}


@pytest.mark.parametrize(("checkpoint", "bundle"), UNTOUCHED, ids=[b for _, b in UNTOUCHED])
def test_an_untouched_copy_passes(
    checkpoint: str, bundle: str, check: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    copy = faults.sabotage(request.getfixturevalue(bundle), tmp_path / "copy", lambda folder: None)
    report = check(checkpoint, copy)
    assert report, [g for g in report.gates if g.verdict != "passed"]
    assert report.tokens_scored > 100
    assert all(run.first_divergence is None for part in report.slices for run in part.greedy)


def test_softcap_dropped_keeps_top1_so_values_are_needed(
    check: Any, gemma_bundle: Path, tmp_path: Path
) -> None:
    damaged = faults.sabotage(gemma_bundle, tmp_path / "damaged", faults.drop_softcap)
    assert check("tiny_gemma2", damaged).metrics.top1_agreement_tie_adjusted.value == 1


def test_a_flipped_byte_without_sealing_is_a_damaged_bundle(
    check: Any, tiny_bundle: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_bundle, copy)
    faults.flip_byte(copy)
    with pytest.raises(BundleError, match=r"head\.lm\.bin: changed"):
        check("tiny_llama", copy)
