"""Gates: the file, the default rows, and a verdict that is never passed without evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from headport.errors import UsageError
from headport.manifest import Head, Model, Quantization
from headport.validate.figures import FIGURES, figures
from headport.validate.gates import (
    DEFAULT_GATES,
    GateRule,
    Judged,
    check_slices,
    decide,
    evaluate,
    read_gates,
    recipe_name,
)
from headport.validate.report import Metric
from headport.validate.sums import DocumentSums
from tests.validate.reports import around, metrics


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "gates.toml"
    path.write_text(text, encoding="utf-8")
    return path


def verdict(rules: tuple[GateRule, ...], tokens: int = 10, **changes: float | None) -> str:
    results = evaluate(rules, Judged(metrics(**changes), tokens), {})
    return decide([result.verdict for result in results], tokens)


def test_a_gates_file(tmp_path: Path) -> None:
    rules = read_gates(
        file(
            tmp_path,
            """
            [[gate]]
            metric = "top1_agreement"
            min = 1

            [[gate]]
            metric = "perplexity_ratio"
            min = 0.99
            max = 1.01
            slice = "code"
            """,
        )
    )
    assert rules == (
        GateRule(metric="top1_agreement", min=1.0),
        GateRule(metric="perplexity_ratio", min=0.99, max=1.01, slice="code"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[[gate]]\nmetric = 'kl'\nmax = 1",
            r"no such metric; known are top1_agreement, .*kl_mean",
        ),
        ("[[gate]]\nmetric = 'kl_mean'\nmaximum = 1", "maximum"),
        ("[[gate]]\nmetric = 'kl_mean'", "give min, max or both"),
        ("[[gate]]\nmetric = 'kl_mean'\nmax = inf", "must be finite"),
        ("[[gate]]\nmetric = 'kl_mean'\nmax = nan", "must be finite"),
        ("[[gate]]\nmetric = 'kl_mean'\nmax = true", "max"),
        ("[[gate]]\nmetric = 'kl_mean'\nmin = 2\nmax = 1", "nothing can pass"),
        ("[[gate]]\nmetric = 'kl_mean'\nmax = 1\nmargin = -1", "margin of 0 or more"),
        ("[[gate]]\nmetric = 'kl_mean'\nmax = 1\nmargin = 1\nby = 'value'", "is for intervals"),
        ("[[gate]]\nmetric = 'kl_p99'\nmax = 1\nmargin = 1", "is for intervals"),
        ("[[gate]]\nmetric = 'kl_mean'\nmax = 1\nby = 'luck'", "luck"),
        ("[[gate]]\nmax = 1", "metric"),
        ("gate = []", "none found"),
        ("", "gate"),
        ("limit = 1", "limit"),
        ("[[gate", "not a TOML file"),
    ],
)
def test_unusable_gates_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        read_gates(file(tmp_path, text))


def test_a_missing_gates_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_gates(tmp_path / "none.toml")


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    text = "[[gate]]\nmetric = 'a'\nmax = 1\n[[gate]]\nmetric = 'kl_mean'"
    with pytest.raises(UsageError, match=r"gate 1 \(a\).*gate 2 \(kl_mean\)"):
        read_gates(file(tmp_path, text))


def test_a_gate_on_a_text_that_was_not_given_is_refused() -> None:
    rules = (GateRule(metric="kl_mean", max=1, slice="legal"),)
    with pytest.raises(UsageError, match=r"'legal', but --text gave code, prose"):
        check_slices(rules, ["code", "prose"])
    check_slices((GateRule(metric="kl_mean", max=1, slice="*"),), ["code"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.98, "passed"), (0.97999, "failed"), (1.0, "passed"), (None, "undecided")],
)
def test_a_bound_itself_passes(value: float | None, expected: str) -> None:
    rules = (GateRule(metric="top1_agreement", min=0.98, by="value"),)
    assert verdict(rules, top1_agreement=value) == expected


@pytest.mark.parametrize("ratio", [0.9969, 1.0031])
def test_both_sides_of_a_range_count(ratio: float) -> None:
    rules = (GateRule(metric="perplexity_ratio", min=0.997, max=1.003),)
    assert verdict(rules, perplexity_ratio=ratio) == "failed"


def test_a_failure_outweighs_what_is_undecided() -> None:
    rules = (GateRule(metric="kl_mean", max=1.0), GateRule(metric="top1_agreement", min=0.5))
    assert verdict(rules, kl_mean=None, top1_agreement=0.1) == "failed"
    assert verdict(rules, kl_mean=None) == "undecided"
    assert verdict(rules) == "passed"


def test_nothing_scored_or_no_gate_is_never_passed() -> None:
    assert verdict((GateRule(metric="kl_mean", max=1.0),), tokens=0) == "undecided"
    assert verdict(()) == "undecided"
    nothing = figures(DocumentSums(1, 0).part())
    for rules in DEFAULT_GATES.values():
        results = evaluate(rules, Judged(nothing, 0), {})
        assert decide([result.verdict for result in results], 0) == "undecided"


def test_slices_are_judged_by_themselves() -> None:
    values = {"code": 0.5, "prose": 0.1, "@rare": 0.9}
    by_name = {name: Judged(metrics(kl_mean=value), 10) for name, value in values.items()}
    rules = (
        GateRule(metric="kl_mean", max=0.2),
        GateRule(metric="kl_mean", max=0.2, slice="code"),
        GateRule(metric="kl_mean", max=0.2, slice="*"),
        GateRule(metric="kl_mean", max=0.2, slice="@rare"),
    )
    check_slices(rules, ["code", "prose"])
    results = evaluate(rules, Judged(metrics(kl_mean=0.15), 10), by_name)
    assert [(r.slice, r.verdict) for r in results] == [
        (None, "passed"),
        ("code", "failed"),
        ("code", "failed"),
        ("prose", "passed"),
        ("@rare", "failed"),
    ]


Format = Literal["fp16", "int8"]


def model(dtype: Any) -> Model:
    return Model(architecture="T", hidden_size=4, layers=1, max_context=8, dtype=dtype)


def head(quantization: Format | None) -> Head:
    found = None
    if quantization:
        found = Quantization(format=quantization, block=None, activations="exact")
    return Head(
        graph="head.lm",
        outputs="logits",
        vocab_size=4,
        scale=1.0,
        softcap=None,
        bias=False,
        weight="w",
        tied=False,
        quantization=found,
    )


@pytest.mark.parametrize(
    ("dtype", "quantization", "expected"),
    [
        ("fp32", None, "fp32"),
        ("fp32", "int8", "int8"),
        ("fp32", "fp16", "fp16"),
        ("fp16", None, "fp16"),
        ("fp16", "int8", "int8"),
        ("bf16", "fp16", "bf16"),
    ],
)
def test_the_coarsest_format_names_the_recipe(
    dtype: str, quantization: Format | None, expected: str
) -> None:
    assert recipe_name(model(dtype), head(quantization)) == expected


def test_default_rows_judge_as_documented() -> None:
    assert verdict(DEFAULT_GATES["int8"]) == "passed"
    assert verdict(DEFAULT_GATES["int8"], kl_mean=2.1e-3) == "failed"
    assert verdict(DEFAULT_GATES["fp32"]) == "failed"
    exact = {"max_abs_logit_error": 1e-3, "kl_mean": 1e-6, "top1_agreement_tie_adjusted": 1.0}
    assert verdict(DEFAULT_GATES["fp32"], **exact) == "passed"
    known = {figure.name for figure in FIGURES}
    assert all(rule.metric in known for rules in DEFAULT_GATES.values() for rule in rules)


def judge(metric: Metric, rule: GateRule, tokens: int = 1000) -> Any:
    figures_ = msgspec.structs.replace(metrics(), **{rule.metric: metric})
    return evaluate((rule,), Judged(figures_, tokens), {})[0]


@pytest.mark.parametrize(
    ("value", "error", "margin", "expected"),
    [
        (1.0020, 0.0004, 0.0, "passed"),  # 1.0012 … 1.0028
        (1.0020, 0.0006, 0.0, "undecided"),  # reaches 1.0032
        (1.0040, 0.0006, 0.0, "undecided"),  # begins at 1.0028
        (1.0040, 0.0004, 0.0, "failed"),  # begins at 1.0032
        (1.0028, 0.0004, 0.001, "passed"),  # holds the limit, all below 1.004
        (1.0028, 0.0008, 0.001, "undecided"),  # reaches 1.0044
        (1.0032, 0.0004, 0.002, "undecided"),  # beyond the limit, but not surely
        (1.0040, 0.0004, 0.002, "failed"),  # surely: a margin excuses no figure
        (0.9960, 0.0004, 0.0, "failed"),  # too good is wrong, too
    ],
)
def test_a_verdict_needs_the_whole_interval(
    value: float, error: float, margin: float, expected: str
) -> None:
    rule = GateRule(metric="perplexity_ratio", min=0.997, max=1.003, margin=margin)
    found = judge(around(value, error), rule)
    assert found.verdict == expected
    assert bool(found.reason) == (expected == "undecided")


def test_an_undecided_gate_says_how_many_tokens_are_needed() -> None:
    rule = GateRule(metric="perplexity_ratio", max=1.003)
    found = judge(around(1.002, 0.001), rule)  # half width 0.002, distance 0.001: four times
    assert found.verdict == "undecided"
    assert found.tokens_needed == pytest.approx(4000, abs=1)
    assert "too few tokens" in found.reason and "holds 1.003" in found.reason
    # An effect of 0.003 found in 90 % of samples: 3.2415 SE = 0.003.
    assert found.tokens_recommended == pytest.approx(1000 * (3.2415 * 0.001 / 0.003) ** 2, rel=1e-3)
    assert found.detectable == pytest.approx(3.2415e-3, rel=1e-4)
    assert judge(around(1.003, 0.001), rule).tokens_needed is None, "no number would decide"


def test_one_document_has_no_interval_and_decides_nothing() -> None:
    rule = GateRule(metric="kl_mean", max=1.0)
    assert judge(Metric(value=0.1), rule).reason == "an interval needs at least two documents"
    by_value = GateRule(metric="kl_mean", max=1.0, by="value")
    assert judge(Metric(value=0.1), by_value).verdict == "passed"


def test_extremes_and_percentiles_are_held_by_value() -> None:
    found = judge(Metric(value=0.1), GateRule(metric="kl_p99", max=0.2))
    assert (found.by, found.verdict) == ("value", "passed")
