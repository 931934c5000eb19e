"""A reference of likeliest tokens: ranks and likelihoods are exact, KL lies within its bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headport.errors import UsageError
from headport.metrics import score_rows, top_ids
from headport.validate import recording
from headport.validate.command import Options, validate, validate_with
from headport.validate.top_rows import TopRows, _extreme, _spread

ROWS, SIZE = 12, 60


def logits(seed: int, drift: float) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    z = (3 * rng.normal(size=(ROWS, SIZE))).astype(np.float32)
    c = (z + drift * rng.normal(size=z.shape)).astype(np.float32)
    return z, c, rng.integers(0, SIZE, ROWS)


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.05, 0.5, 3.0]), st.sampled_from([16, 30, 60]))
def test_the_true_kl_lies_between_its_bounds(seed: int, drift: float, count: int) -> None:
    z, c, targets = logits(seed, drift)
    true = score_rows(z, c, targets, np.zeros(ROWS)).kl
    completed, least, most = TopRows.of_logits(z, targets, count).completed(c, targets)
    assert (least <= true + 1e-6).all() and (true <= most + 1e-6).all()
    found = score_rows(completed, c, targets, np.zeros(ROWS))
    np.testing.assert_allclose(found.kl, least, rtol=1e-4, atol=2e-7)
    if count == SIZE:
        np.testing.assert_allclose(least, most, atol=1e-9)


@given(st.integers(0, 1000), st.sampled_from([0.05, 3.0]))
def test_ranks_and_likelihoods_are_exact(seed: int, drift: float) -> None:
    z, c, targets = logits(seed, drift)
    completed, _, _ = TopRows.of_logits(z, targets, 16).completed(c, targets)
    np.testing.assert_array_equal(top_ids(completed, 10), top_ids(z, 10))
    exact, found = (score_rows(rows, c, targets, np.zeros(ROWS)) for rows in (z, completed))
    np.testing.assert_allclose(found.nll_reference, exact.nll_reference, atol=3e-6)
    np.testing.assert_allclose(found.delta_p, exact.delta_p, atol=3e-6)
    np.testing.assert_array_equal(found.agreement, exact.agreement)


def test_bounds_by_hand() -> None:
    q = np.array([0.4, 0.1])
    np.testing.assert_allclose(_spread(q, 0.2, 1.0), [0.16, 0.04])
    np.testing.assert_allclose(_spread(q, 0.2, 0.15), [0.15, 0.05])  # the rest goes on
    # All of 0.2 with at most 0.15 each: 0.15 on the less likely, 0.05 on the other.
    expected = 0.15 * np.log(0.15 / 0.1) + 0.05 * np.log(0.05 / 0.4)
    assert _extreme(np.log(q), 0.2, 0.15) == pytest.approx(expected)
    assert _extreme(np.log(q), 0.0, 0.15) == 0


def test_positions_are_read_as_they_were_stored() -> None:
    z, _, targets = logits(0, 0.0)
    rows = TopRows.of_logits(z, targets, 20)
    again = TopRows.read(np.frombuffer(rows.stored().tobytes(), TopRows.layout(20)))
    for name in ("ids", "log_p", "target_log_p", "rest"):
        np.testing.assert_array_equal(getattr(again, name), getattr(rows, name))
    assert TopRows.layout(256).itemsize * 20 < 4 * 49152, "a twentieth of the logits at most"


@pytest.fixture(scope="module")
def store(tiny_llama: Path, texts: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("top") / "ref"
    recording.record(
        recording.Options(
            model=str(tiny_llama), text=texts, output=folder, window=40, greedy_tokens=6, top=64
        )
    )
    return folder


def test_a_bundle_is_judged_by_what_is_known(
    store: Path, tiny_bundle: Path, tiny_llama: Path, texts: Any, reference_of: Any
) -> None:
    live = validate_with(
        reference_of(tiny_llama),
        Options(bundle=tiny_bundle, reference=str(tiny_llama), text=texts, window=40),
    )
    report = validate(Options(bundle=tiny_bundle, reference=str(store), greedy_tokens=6))
    assert report.verdict == "passed"
    assert [gate.metric for gate in report.gates] == ["top1_agreement_tie_adjusted"]
    for name in ("perplexity_reference", "perplexity_candidate", "top10_agreement"):
        found, expected = (getattr(r.metrics, name).value for r in (report, live))
        assert found == pytest.approx(expected, rel=1e-6), name
    assert report.attribution is None and report.noise_floor is not None
    assert report.protocol.top_only and not live.protocol.top_only
    assert any("The true mean KL lies between" in note for note in report.notes)
    assert not any("The true mean KL" in note for note in live.notes)


def test_gates_that_need_the_rest_are_refused(
    store: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    gates = tmp_path / "gates.toml"
    gates.write_text('[[gate]]\nmetric = "kl_mean"\nmax = 1\n')
    with pytest.raises(UsageError, match="decide no gate on kl_mean"):
        validate(Options(bundle=tiny_bundle, reference=str(store), gates=gates))


@pytest.mark.parametrize("count", [15, 258])
def test_counts_out_of_range_are_refused(
    count: int, tiny_llama: Path, texts: Any, tmp_path: Path
) -> None:
    options = recording.Options(
        model=str(tiny_llama), text=texts, output=tmp_path / "ref", top=count
    )
    with pytest.raises(UsageError, match="--top: 16 to the vocabulary's 257 expected"):
        recording.record(options)


def test_a_head_that_is_no_matrix_needs_it(
    tiny_llama: Path, texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headport.errors import CheckpointError, ExportError
    from headport.export import head

    def refuse(_model: Any) -> Any:
        raise ExportError("no head matrix")

    monkeypatch.setattr(head, "probe_head", refuse)
    options = recording.Options(
        model=str(tiny_llama), text=texts, output=tmp_path / "ref", greedy_tokens=0
    )
    with pytest.raises(CheckpointError, match="pass --top 256"):
        recording.record(options)
