"""Judging what a GPU gave: recorded results pass, planted bad ones fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.lowering import Options, lower
from headport.manifest import SelftestTolerance
from headport.runner import open_runner
from headport.selftest import SelftestResult
from headport.session import SessionSettings
from headport.validate.gpu.numerics import (
    Reply,
    check_greedy,
    check_selftest,
    judge_greedy,
    judge_parity,
    judge_selftest,
)
from headport.validate.gpu.speed import check_capture, judge_capture, measure_latency
from headport.validate.gpu.steps import Context, Unproven
from tests.lowering.backbones import CONTEXT, HIDDEN, VOCAB, Layer, attention_backbone
from tests.toy_bundles import write_toy

TOLERANCE = SelftestTolerance(hidden_states=0.02, logits=0.05)


def test_selftest() -> None:
    good = judge_selftest(SelftestResult(0.01, {"lm": 0.04}, TOLERANCE, {}))
    assert good.status == "proved" and "lm 4.00e-02 (accepted 5.00e-02)" in good.text
    for hidden, logits in ((0.03, 0.0), (0.0, 0.06), (float("inf"), 0.0), (0.0, float("nan"))):
        assert judge_selftest(SelftestResult(hidden, {"lm": logits}, TOLERANCE, {})).status == (
            "failed"
        )


def test_a_certificate_that_does_not_hold_fails() -> None:
    class _Broken(SimpleNamespace):
        def __bool__(self) -> bool:
            return False

    result = SelftestResult(0.0, {"lm": 0.0}, TOLERANCE, {"lm": _Broken()})
    assert not result


def _report(verdict: str, *gates: tuple[str, str], kl: float | None = 1e-6) -> Any:
    names = ("kl_max", "top1_agreement", "perplexity_ratio", "max_abs_logit_error")
    metrics = {name: SimpleNamespace(value=1.0) for name in names}
    return SimpleNamespace(
        verdict=verdict,
        tokens_scored=120,
        gates=[SimpleNamespace(metric=m, verdict=v) for m, v in gates],
        metrics=SimpleNamespace(kl_mean=SimpleNamespace(value=kl), **metrics),
    )


def test_parity_takes_over_the_verdict() -> None:
    good = judge_parity(_report("passed", ("kl_mean", "passed")))
    assert good.status == "proved" and good.figures["kl_mean"] == 1e-6
    bad = judge_parity(_report("failed", ("kl_mean", "failed"), ("top1_agreement", "passed")))
    assert bad.status == "failed" and bad.text.endswith("failed: kl_mean")
    undecided = judge_parity(_report("undecided", ("kl_mean", "undecided"), kl=None))
    assert undecided.status == "failed" and "undecided: kl_mean" in undecided.text


def _reply(*token_ids: int, margin: float = 1.0) -> Reply:
    return Reply(token_ids, tuple(margin for _ in token_ids))


def test_greedy_tokens() -> None:
    expected = [_reply(1, 2, 3), _reply(4, 5, 6, margin=0.05)]
    same = judge_greedy(expected, expected, 0.1)
    assert same.status == "proved" and same.text.endswith("all equal")
    tied = judge_greedy(expected, [_reply(1, 2, 3), _reply(4, 9, 9)], 0.1)
    assert tied.status == "proved" and tied.figures["near_ties"] == [
        {"prompt": 1, "step": 1, "margin": 0.05}
    ]
    wrong = judge_greedy(expected, [_reply(1, 9, 3), _reply(4, 5, 6)], 0.1)
    assert wrong.status == "failed"
    assert "prompt 0 parts at step 1, where the CPU's first choice leads by 1 logits" in wrong.text
    assert judge_greedy([], [], 0.1).status == "failed"  # comparing nothing is a failure


@pytest.mark.parametrize(
    ("found", "status"),
    [(0.01, "proved"), (0.03, "failed"), (np.nan, "failed")],
)
def test_recorded_steps(found: float, status: str) -> None:
    times = {"plain_ms": 2.0, "recorded_ms": 1.0}
    rows = np.zeros((3, 4), np.float32)
    other = rows.copy()
    other[1, 2] = found
    assert judge_capture(rows, other, 0.02, times).status == status
    assert judge_capture(rows[:0], rows[:0], 0.02, times).status == "failed"


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """An `ort-cuda` bundle as the steps see it, but run by the CPU provider."""
    folder = tmp_path_factory.mktemp("steps")
    weight = np.random.default_rng(1).normal(size=(VOCAB, HIDDEN)).astype(np.float16)
    backbone = attention_backbone([Layer(window=5)], half=True)
    source = write_toy(folder / "a", weight, backbone=backbone, max_context=CONTEXT)
    bundle = lower(Options(bundle=source.path, output=folder / "b", target="ort-cuda"))
    settings = SessionSettings(provider="cpu")
    found = Context(SimpleNamespace(), bundle, settings)
    found.found["runner"] = open_runner(bundle, settings)
    return found


def test_steps_run_from_end_to_end(context: Context) -> None:
    assert check_selftest(context).status == "proved"
    assert check_greedy(context).figures["tokens"] == 4 * (CONTEXT - 1)
    assert check_capture(context).status == "proved"
    figures = measure_latency(context).figures
    assert figures["batch_8"]["decode_ms"]["median"] > 0
    assert figures["prefill_ms"]["tokens"] == CONTEXT


def test_other_answers_are_noticed(context: Context, tmp_path: Path) -> None:
    weight = np.random.default_rng(2).normal(size=(VOCAB, HIDDEN)).astype(np.float16)
    backbone = attention_backbone([Layer(window=5)], half=True)
    other = write_toy(tmp_path / "a", weight, backbone=backbone, max_context=CONTEXT)
    strange = Context(context.options, context.bundle, context.settings)
    strange.found["runner"] = open_runner(Bundle.open(other.path), SessionSettings(provider="cpu"))
    assert check_greedy(strange).status == "failed"


def test_growing_caches_cannot_be_recorded(context: Context, tmp_path: Path) -> None:
    weight = np.random.default_rng(2).normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    bundle = write_toy(tmp_path / "a", weight, backbone=attention_backbone([Layer()]))
    growing = Context(context.options, bundle, context.settings)
    growing.found["runner"] = open_runner(bundle, context.settings)
    with pytest.raises(Unproven, match="its caches grow"):
        check_capture(growing)
