"""Gates as tests: `pytest examples/ci --headport-bundle DIR --headport-reference REF`."""

from __future__ import annotations

from collections.abc import Callable

from headport.bundle import Bundle
from headport.validate import Report


def test_the_bundle_answers_like_its_reference(assert_gates: Callable[..., None]) -> None:
    """Every gate, on all texts."""
    assert_gates()


def test_it_is_the_release_that_was_meant(headport_bundle: Bundle) -> None:
    """Whatever else a release has to be."""
    assert "lm" in headport_bundle.manifest.heads


def test_rare_tokens_are_kept(headport_report: Report) -> None:
    """Figures beyond the gates."""
    rare = next(kind for kind in headport_report.position_slices if kind.name == "@rare")
    assert rare.metrics.top1_agreement.value is None or rare.metrics.top1_agreement.value > 0.9
