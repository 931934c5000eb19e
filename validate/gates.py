"""Gates: limits that decide the verdict, from a TOML file or from the recipe's default rows."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from headport.command import record_from_mapping
from headport.errors import UsageError
from headport.manifest import Head, Model
from headport.validate.report import GateResult, Metrics, Verdict

__all__ = [
    "DEFAULT_GATES",
    "GateRule",
    "check_slices",
    "decide",
    "evaluate",
    "read_gates",
    "recipe_name",
]

_METRICS = tuple(field.name for field in msgspec.structs.fields(Metrics))
_EVERY_SLICE = "*"


class GateRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[gate]]`: the metric must lie within [min, max], of which at least one is given.

    slice: name of one text, "*" for every text by itself, absent for all texts together.
    """

    metric: str
    min: float | None = None
    max: float | None = None
    slice: str | None = None


class _GatesFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gate: tuple[GateRule, ...]


_ROUNDED_TO_8_BITS = (
    GateRule(metric="top1_agreement", min=0.98),
    GateRule(metric="perplexity_ratio", min=0.997, max=1.003),
    GateRule(metric="kl_mean", max=2e-3),
)

# recipe → gates. fp16 carries three significant bits more than INT8 with its 127 steps: errors
# are 8 times smaller, so top-1 flips and perplexity drift shrink by 8 and KL by 64; half of that
# gain is asked for. bf16 keeps 8 significant bits, as INT8 does.
DEFAULT_GATES: dict[str, tuple[GateRule, ...]] = {
    "fp32": (
        GateRule(metric="max_abs_logit_error", max=1e-3),
        GateRule(metric="kl_mean", max=1e-6),
        GateRule(metric="top1_agreement_tie_adjusted", min=1.0),
    ),
    "fp16": (
        GateRule(metric="top1_agreement", min=0.995),
        GateRule(metric="perplexity_ratio", min=0.999, max=1.001),
        GateRule(metric="kl_mean", max=6e-5),
    ),
    "bf16": _ROUNDED_TO_8_BITS,
    "int8": _ROUNDED_TO_8_BITS,
}


def recipe_name(model: Model, head: Head) -> str:
    """The row of `DEFAULT_GATES`: the coarsest number format that model and head use."""
    coarseness = ("fp32", "fp16", "bf16", "int8")
    used = {model.dtype, head.quantization.format if head.quantization else "fp32"}
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
    bounds = [bound for bound in (rule.min, rule.max) if bound is not None]
    if not bounds:
        return "give min, max or both"
    if not all(math.isfinite(bound) for bound in bounds):
        return "min and max must be finite"
    if rule.min is not None and rule.max is not None and rule.min > rule.max:
        return f"min {rule.min:g} is above max {rule.max:g}, so nothing can pass"
    return None


def evaluate(
    rules: Iterable[GateRule], overall: Metrics, slices: Mapping[str, Metrics]
) -> tuple[GateResult, ...]:
    """Hold figures against limits; a figure without value leaves its gate undecided.

    Args:
        rules: Gates that passed `check_slices`.
        overall: Figures of all texts together.
        slices: Figures of each text by name.
    """
    results = []
    for rule in rules:
        if rule.slice is None:
            results.append(_result(rule, None, overall))
        elif rule.slice == _EVERY_SLICE:
            results += [_result(rule, name, metrics) for name, metrics in slices.items()]
        else:
            results.append(_result(rule, rule.slice, slices[rule.slice]))
    return tuple(results)


def check_slices(rules: Iterable[GateRule], names: Iterable[str]) -> None:
    """Raise `UsageError` if a rule names a text that was not given."""
    known = tuple(names)
    for rule in rules:
        if rule.slice not in (None, _EVERY_SLICE, *known):
            raise UsageError(
                f"a gate on {rule.metric} names the text {rule.slice!r}, "
                f"but --text gave {', '.join(known)}"
            )


def _result(rule: GateRule, slice_name: str | None, metrics: Metrics) -> GateResult:
    value: float | None = getattr(metrics, rule.metric).value
    return GateResult(
        metric=rule.metric,
        slice=slice_name,
        min=rule.min,
        max=rule.max,
        value=value,
        verdict=_verdict(rule, value),
    )


def _verdict(rule: GateRule, value: float | None) -> Verdict:
    if value is None:
        return "undecided"
    low = -math.inf if rule.min is None else rule.min
    high = math.inf if rule.max is None else rule.max
    return "passed" if low <= value <= high else "failed"


def decide(results: Iterable[GateResult], tokens_scored: int) -> Verdict:
    """`failed` if any gate failed; `passed` only if something was scored and every gate passed."""
    verdicts = {result.verdict for result in results}
    if "failed" in verdicts:
        return "failed"
    return "passed" if verdicts == {"passed"} and tokens_scored else "undecided"
