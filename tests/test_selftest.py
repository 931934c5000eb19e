"""The stored self-test notices changed weights, another head and broken files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headport.bundle import SELFTEST_FILE, Bundle
from headport.errors import BundleError
from headport.ledger import find_tensor
from headport.selftest import run_selftest, write_selftest
from tests.toy_bundles import write_toy


@pytest.fixture
def toy(tmp_path: Path) -> Bundle:
    weight = np.random.default_rng(0).normal(size=(31, 24)).astype(np.float32)
    return write_toy(tmp_path / "toy", weight, bias=np.ones(31, np.float32))


def test_untouched_bundle_passes_and_is_readable_by_all(toy: Bundle) -> None:
    found = run_selftest(toy)
    assert found and found.hidden_states_error == 0 and found.logits_error == {"lm": 0.0}
    assert (toy.path / SELFTEST_FILE).stat().st_mode & 0o444 == 0o444


def _scale_tensor(bundle: Bundle, graph: str, name: str, factor: float) -> None:
    tensor = find_tensor(bundle.manifest, graph, name)
    data = np.memmap(bundle.path / tensor.file, np.float32, "r+", tensor.offset, tensor.shape)
    data *= np.float32(factor)
    data.flush()


def test_a_changed_head_shows_in_the_logits_alone(toy: Bundle) -> None:
    _scale_tensor(toy, "head.lm", "w", 1.001)
    found = run_selftest(toy)
    assert not found and found.hidden_states_error == 0
    assert found.logits_error["lm"] > found.tolerance.logits


def test_a_changed_backbone_shows_in_the_hidden_states_alone(toy: Bundle) -> None:
    _scale_tensor(toy, "backbone", "embed", 1.001)
    found = run_selftest(toy)
    assert not found and found.hidden_states_error > found.tolerance.hidden_states
    assert found.logits_error["lm"] == 0


def test_both_targets_pass_their_own(tiny_bundle: Path, tiny_lowered: Path) -> None:
    for path in (tiny_bundle, tiny_lowered):
        found = run_selftest(Bundle.open(path))
        assert found and found.tolerance.logits < 1e-2


def test_missing_or_foreign_files_are_refused(toy: Bundle) -> None:
    stored = load_file(toy.path / SELFTEST_FILE)
    save_file({k: v for k, v in stored.items() if k != "hidden_states"}, toy.path / SELFTEST_FILE)
    with pytest.raises(BundleError, match="no tensor 'hidden_states' in it"):
        run_selftest(toy)
    (toy.path / SELFTEST_FILE).write_bytes(b"nonsense")
    with pytest.raises(BundleError, match="cannot be read"):
        run_selftest(toy)
    bare = msgspec.structs.replace(toy.manifest, selftest=None)
    with pytest.raises(BundleError, match="carries no self-test"):
        run_selftest(Bundle(toy.path, bare))


def test_other_shapes_fail_instead_of_passing(toy: Bundle) -> None:
    stored = load_file(toy.path / SELFTEST_FILE)
    stored["lm.logits"] = stored["lm.logits"][:, :-1].copy()
    save_file(stored, toy.path / SELFTEST_FILE)
    found = run_selftest(toy)
    assert not found and found.logits_error["lm"] == float("inf")


def test_non_finite_outputs_are_never_stored(toy: Bundle) -> None:
    _scale_tensor(toy, "head.lm", "w", np.inf)
    (toy.path / SELFTEST_FILE).unlink()
    with pytest.raises(BundleError, match=r"non-finite lm\.logits"):
        write_selftest(toy)
    assert not (toy.path / SELFTEST_FILE).exists()
