"""What to do after reading a report: one row per situation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headport.validate.report import Report

__all__ = ["next_steps"]


@dataclass(frozen=True)
class _Advice:
    """A situation, and what to do in it."""

    when: Callable[[Report], bool]
    say: Callable[[Report], str]


def _failed(report: Report) -> list[str]:
    gates = [
        f"{g.metric} ({g.slice or 'all texts'})" for g in report.gates if g.verdict == "failed"
    ]
    return gates + [f"{r.metric} (baseline)" for r in report.regressions if r.verdict == "failed"]


def _needed(report: Report) -> int:
    return max((gate.tokens_needed or 0 for gate in report.gates), default=0)


def _one_document(report: Report) -> bool:
    """Whether a gate has a figure to hold but no interval, which two documents would give."""
    return any(
        gate.by == "interval" and gate.value is not None and None in (gate.low, gate.high)
        for gate in report.gates
    )


def _drifts_in(part: str) -> Callable[[Report], bool]:
    def drifts(report: Report) -> bool:
        found = report.attribution
        return report.verdict != "passed" and found is not None and part in found.largest

    return drifts


_ROWS = (
    _Advice(
        lambda r: r.reference.sha256 != r.candidate.checkpoint_sha256,
        lambda r: (
            f"First make sure that the reference is the right one: the bundle was exported from "
            f"{r.candidate.checkpoint}, whose weights are others than those of "
            f"{r.reference.checkpoint}."
        ),
    ),
    _Advice(
        lambda r: bool(_failed(r)),
        lambda r: f"Do not ship this bundle: {', '.join(_failed(r))} failed.",
    ),
    _Advice(
        _drifts_in("head"),
        lambda _: (
            "Most of the drift arises in the head: store it more finely (headport quantize --head "
            "int8, a smaller --block, --calibration texts) or let it give candidates that are "
            "scored with the original weight (--rescore), then validate again."
        ),
    ),
    _Advice(
        lambda r: _drifts_in("backbone")(r) and r.bisection is None,
        lambda _: (
            "Most of the drift arises in the backbone: validate again with --bisect, which names "
            "the first layer that leaves the reference."
        ),
    ),
    _Advice(
        lambda r: _drifts_in("backbone")(r) and r.bisection is not None,
        lambda r: f"The backbone: {r.bisection.finding if r.bisection else ''}.".replace("..", "."),
    ),
    _Advice(
        lambda r: r.verdict == "failed" and r.attribution is None,
        lambda _: (
            "Validate again with --attribution-tokens 512, which says where the drift arises."
        ),
    ),
    _Advice(
        lambda r: r.sampler is not None and r.sampler.verdict == "failed",
        lambda _: "A sampler draws other tokens than transformers: see the rows of its table.",
    ),
    _Advice(
        lambda r: r.verdict == "undecided" and _needed(r) > 0,
        lambda r: (
            f"Score more text: about {_needed(r)} tokens, {r.tokens_scored} were scored, decide "
            "every open gate if the figures stay where they are (more --text, larger --max-tokens)."
        ),
    ),
    _Advice(
        lambda r: r.verdict == "undecided" and _one_document(r),
        lambda _: "Give more documents: intervals need at least two, blocks between blank lines.",
    ),
    _Advice(
        lambda r: r.flips.beyond_noise > 0,
        lambda r: (
            f"Look at the {r.flips.beyond_noise} other first choices beyond the run's noise: "
            "something else than rounding is at work there."
        ),
    ),
    _Advice(
        lambda r: r.verdict == "passed",
        lambda _: (
            "The bundle may be shipped as far as these gates go. Keep report.json beside it and "
            "pass it as --baseline when its successor is validated."
        ),
    ),
)


def next_steps(report: Report) -> tuple[str, ...]:
    """What to do next, the most urgent first."""
    return tuple(row.say(report) for row in _ROWS if row.when(report))
