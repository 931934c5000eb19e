"""Gates: limits that decide the verdict, from a TOML file or from the recipe's default rows."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from headport.command import record_from_mapping
from headport.errors import UsageError
from headport.manifest import BackboneQuantization, Head, Model
from headport.validate.certainty import detectable, tokens_for, tokens_to_decide
from headport.validate.evidence import Verdict
from headport.validate.figures import FIGURES
from headport.validate.report import GateResult, Metric, Metrics
from headport.validate.sums import CELLS

__all__ = [
    "DEFAULT_GATES",
    "POSITION_SLICES",
    "GateRule",
    "Judged",
    "check_slices",
    "decide",
    "evaluate",
    "read_gates",
    "recipe_name",
]

_METRICS = tuple(figure.name for figure in FIGURES)
_BY_VALUE = {figure.name for figure in FIGURES if not figure.interval}
_EVERY_SLICE = "*"
POSITION_SLICES = tuple(f"@{name}" for name in CELLS)
# Where a figure stands if nothing drifts, and which change the recommended sample must find.
_WITHOUT_DRIFT = {"perplexity_ratio": 1.0}


class GateRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[gate]]`: the metric must lie within [min, max], of which at least one is given.

    margin: how far the interval may reach beyond a limit that the figure itself holds.

    slice: name of one text, "*" for every text by itself, "@rare", "@common", "@early" or "@late"
    for positions of one kind, absent for all texts together.
    by: "interval" holds the 95 % interval against the limit, "value" the figure alone.
    """

    metric: str
    min: float | None = None
    max: float | None = None
    margin: float = 0.0
    slice: str | None = None
    by: Literal["interval", "value"] = "interval"


class _GatesFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gate: tuple[GateRule, ...]


@dataclass(frozen=True)
class Judged:
    """Figures of one slice, and of how many tokens."""

    metrics: Metrics
    tokens: int
    documents: int = 0  # that they lie in; 0: not known


_ROUNDED_TO_8_BITS = (
    GateRule(metric="top1_agreement", min=0.98, margin=0.005),
    GateRule(metric="perplexity_ratio", min=0.997, max=1.003, margin=0.002),
    GateRule(metric="kl_mean", max=2e-3, margin=5e-4),
)

# Measured on SmolLM2's head with noise (docs/quantize.md): INT4 in blocks of 32, compensated, top-1
# 90.8 %, KL 2.6e-2, perplexity + 2.9 %. INT4 rounded to nearest loses several times that, and fp8
# with a scale per row more perplexity (+ 4.0 %): neither should pass unseen.
_ROUNDED_TO_4_BITS = (
    GateRule(metric="top1_agreement", min=0.88, margin=0.01),
    GateRule(metric="perplexity_ratio", min=0.98, max=1.03, margin=0.01),
    GateRule(metric="kl_mean", max=4e-2, margin=1e-2),
)

# recipe → gates. An fp32 bundle claims sameness up to rounding: that is a fact of every position,
# not a share of a population, so its gates look at values. fp16 carries three significant bits
# more than INT8 with its 127 steps: errors are 8 times smaller, so top-1 flips and perplexity
# drift shrink by 8 and KL by 64; half of that gain is asked for. bf16 keeps 8 significant bits,
# as INT8 does. The INT8 row is 2.5 times what llama.cpp measures for Q8_0 in flips (99.2 % same
# top), and its 0.3 % of perplexity is the smallest step that evaluations usually report. Margins
# are what a few thousand tokens can exclude; larger samples need none.
DEFAULT_GATES: dict[str, tuple[GateRule, ...]] = {
    "fp32": (
        GateRule(metric="max_abs_logit_error", max=1e-3, by="value"),
        GateRule(metric="kl_mean", max=1e-6, by="value"),
        GateRule(metric="top1_agreement_tie_adjusted", min=1.0, by="value"),
    ),
    "fp16": (
        GateRule(metric="top1_agreement", min=0.995, margin=0.003),
        GateRule(metric="perplexity_ratio", min=0.999, max=1.001, margin=0.0005),
        GateRule(metric="kl_mean", max=6e-5, margin=2e-5),
    ),
    "bf16": _ROUNDED_TO_8_BITS,
    "int8": _ROUNDED_TO_8_BITS,
    "int8-row": _ROUNDED_TO_8_BITS,
    "fp8": _ROUNDED_TO_4_BITS,
    "int4": _ROUNDED_TO_4_BITS,
}


def recipe_name(model: Model, head: Head, backbone: BackboneQuantization | None = None) -> str:
    """The row of `DEFAULT_GATES`: the coarsest number format that model and head use."""
    coarseness = ("fp32", "fp16", "bf16", "int8", "int8-row", "fp8", "int4")
    used = {model.dtype, head.quantization.format if head.quantization else "fp32"}
    if backbone is not None:
        stored = (*backbone.matrices.values(), *backbone.embedding.values())
        used |= {how.format for how in stored}
    return max(used, key=coarseness.index)


def read_gates(file: Path) -> tuple[GateRule, ...]:
    """Read a gates file.

    Raises:
        UsageError: If it is missing, not TOML, holds no gate, an unknown key or metric, or a
            gate that could never or always pass.
    """
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise UsageError(f"{file}: not a TOML file: {error}") from error
    rules: tuple[GateRule, ...] = record_from_mapping(_GatesFile, found, str(file)).gate
    if not rules:
        raise UsageError(f"{file}: at least one [[gate]] expected, none found")
    faults = [
        f"gate {number} ({rule.metric}): {fault}"
        for number, rule in enumerate(rules, start=1)
        if (fault := _fault(rule))
    ]
    if faults:
        raise UsageError(f"{file}: " + "; ".join(faults))
    return rules


def _fault(rule: GateRule) -> str | None:
    if rule.metric not in _METRICS:
        return f"no such metric; known are {', '.join(_METRICS)}"
    given = [bound for bound in (rule.min, rule.max) if bound is not None]
    if not given:
        return "give min, max or both"
    if not all(math.isfinite(bound) for bound in given):
        return "min and max must be finite"
    if not (math.isfinite(rule.margin) and rule.margin >= 0):
        return f"a margin of 0 or more was expected, {rule.margin:g} found"
    if rule.margin and (rule.by == "value" or rule.metric in _BY_VALUE):
        return "a margin is for intervals, and this gate is held by value"
    if rule.min is not None and rule.max is not None and rule.min > rule.max:
        return f"min {rule.min:g} is above max {rule.max:g}, so nothing can pass"
    return None


def evaluate(
    rules: Iterable[GateRule], overall: Judged, slices: Mapping[str, Judged]
) -> tuple[GateResult, ...]:
    """Hold figures against limits; what cannot be known leaves its gate undecided.

    Args:
        rules: Gates that passed `check_slices`.
        overall: Figures of all texts together.
        slices: Figures of each text by name, and of each kind of positions by its @name.
    """
    results = []
    for rule in rules:
        if rule.slice is None:
            results.append(_result(rule, None, overall))
        elif rule.slice == _EVERY_SLICE:
            texts = {n: judged for n, judged in slices.items() if n not in POSITION_SLICES}
            results += [_result(rule, name, judged) for name, judged in texts.items()]
        else:
            results.append(_result(rule, rule.slice, slices[rule.slice]))
    return tuple(results)


def check_slices(rules: Iterable[GateRule], names: Iterable[str]) -> None:
    """Raise `UsageError` if a rule names a text that was not given."""
    known = tuple(names)
    for rule in rules:
        if rule.slice not in (None, _EVERY_SLICE, *POSITION_SLICES, *known):
            raise UsageError(
                f"a gate on {rule.metric} names the text {rule.slice!r}, "
                f"but --text gave {', '.join(known)}"
            )


def _result(rule: GateRule, slice_name: str | None, judged: Judged) -> GateResult:
    metric: Metric = getattr(judged.metrics, rule.metric)
    by = "value" if rule.metric in _BY_VALUE else rule.by
    verdict, reason, needed = _verdict(rule, metric, by, judged.tokens)
    return GateResult(
        metric=rule.metric,
        slice=slice_name,
        min=rule.min,
        max=rule.max,
        margin=rule.margin,
        by=by,
        value=metric.value,
        low=metric.low,
        high=metric.high,
        verdict=verdict,
        reason=reason,
        detectable=None if metric.error is None else detectable(metric.error),
        tokens_needed=needed,
        tokens_recommended=_recommended(rule, metric, judged) if by == "interval" else None,
    )


def _limits(rule: GateRule) -> tuple[float, float]:
    least = -math.inf if rule.min is None else rule.min
    most = math.inf if rule.max is None else rule.max
    return least, most


def _verdict(
    rule: GateRule, metric: Metric, by: str, tokens: int
) -> tuple[Verdict, str, int | None]:
    least, most = _limits(rule)
    value, low, high = metric.value, metric.low, metric.high
    if value is None:
        return "undecided", "the figure has no value", None
    holds = least <= value <= most
    if by == "value":
        return ("passed" if holds else "failed"), "", None
    if low is None or high is None:
        return "undecided", "an interval needs at least two documents", None
    if holds and least - rule.margin <= low and high <= most + rule.margin:
        return "passed", "", None
    if high < least or low > most:
        return "failed", "", None
    # A figure that holds its limit must clear the margin; another must clear the limit itself.
    beyond = rule.margin if holds else 0.0
    crossed = [edge for edge in (least - beyond, most + beyond) if low <= edge <= high]
    edge = min(crossed, key=lambda found: abs(found - value))
    toward = high if edge > value else low
    needed = tokens_to_decide(abs(edge - value), abs(toward - value), tokens)
    return (
        "undecided",
        f"too few tokens: the 95 % interval {low:.6g} … {high:.6g} holds {edge:g}",
        needed,
    )


def _recommended(rule: GateRule, metric: Metric, judged: Judged) -> int | None:
    ideal = _WITHOUT_DRIFT.get(rule.metric)
    if ideal is None or metric.error is None:
        return None
    effect = min(abs(edge - ideal) for edge in _limits(rule) if math.isfinite(edge))
    return tokens_for(effect, metric.error, judged.tokens, judged.documents)


def decide(verdicts: Iterable[Verdict], tokens_scored: int) -> Verdict:
    """`failed` if anything failed; `passed` only if something was scored and everything passed."""
    found = set(verdicts)
    if "failed" in found:
        return "failed"
    return "passed" if found == {"passed"} and tokens_scored else "undecided"
