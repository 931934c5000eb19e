"""Steps that hold the GPU's answers against stored ones, PyTorch's, and the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.runner import Runner, open_runner
from headport.selftest import SelftestResult, run_selftest
from headport.session import SessionSettings
from headport.validate.command import Options as ValidateOptions
from headport.validate.command import validate
from headport.validate.gpu.steps import Context, Finding, Unproven
from headport.validate.report import Report

__all__ = [
    "Reply",
    "check_greedy",
    "check_parity",
    "check_selftest",
    "judge_greedy",
    "judge_parity",
    "judge_selftest",
]

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

_PROMPTS = (17, 5, 32, 1)  # tokens
_STEPS = 32
_FIGURES = ("kl_mean", "kl_max", "top1_agreement", "perplexity_ratio", "max_abs_logit_error")


def check_selftest(context: Context) -> Finding:
    """The stored inputs give the stored outputs, and a certificate holds."""
    return judge_selftest(run_selftest(context.bundle, context.settings))


def judge_selftest(result: SelftestResult) -> Finding:
    """Hold a self-test's errors against its own tolerance."""
    heads = ", ".join(f"{name} {error:.2e}" for name, error in result.logits_error.items())
    text = (
        f"max |Δ| of hidden states {result.hidden_states_error:.2e} (accepted "
        f"{result.tolerance.hidden_states:.2e}), of logits {heads} (accepted "
        f"{result.tolerance.logits:.2e})"
    )
    for name, check in result.certificates.items():
        text += f"; head {name}: {check.text()}"
    figures: dict[str, Any] = {
        "hidden_states_error": result.hidden_states_error,
        "logits_error": result.logits_error,
        "certificates": {name: asdict(check) for name, check in result.certificates.items()},
    }
    return Finding("proved" if result else "failed", text, figures)


def check_parity(context: Context) -> Finding:
    """`headport validate` on the GPU: logits, KL and agreement with PyTorch, by its gates."""
    options = context.options
    if options.reference is None or not options.text:
        raise Unproven("give --reference MODEL and --text FILE to compare with PyTorch")
    report = validate(
        ValidateOptions(
            bundle=context.bundle.path,
            reference=options.reference,
            text=options.text,
            gates=options.gates,
            max_tokens=options.max_tokens,
            batch_size=options.batch_size,
            greedy_tokens=0,
            provider="cuda",
            cpu_fallback=options.cpu_fallback,
        )
    )
    return judge_parity(report)


def judge_parity(report: Report) -> Finding:
    """Take over the verdict of a validation; `undecided` proves nothing and is a failure here."""
    figures = {name: getattr(report.metrics, name).value for name in _FIGURES}
    listed = ", ".join(
        f"{name} {value:.4g}" for name, value in figures.items() if value is not None
    )
    failed = [gate.metric for gate in report.gates if gate.verdict != "passed"]
    text = f"{report.tokens_scored} tokens against PyTorch: {listed}"
    if report.verdict != "passed":
        text += f"; {report.verdict}: {', '.join(failed) or 'no gate passed'}"
    return Finding("proved" if report.verdict == "passed" else "failed", text, figures)


@dataclass(frozen=True)
class Reply:
    """A greedy continuation: tokens, and how far the best logit was ahead of the second."""

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]  # logits


def check_greedy(context: Context) -> Finding:
    """Greedy tokens are those of the same bundle on the CPU, but for near ties."""
    manifest = context.bundle.manifest
    assert manifest.selftest is not None
    on_cpu = open_runner(context.bundle, SessionSettings(provider="cpu"))
    expected = _continue(on_cpu, manifest)
    del on_cpu
    found = _continue(context.found["runner"], manifest)
    return judge_greedy(expected, found, 2 * manifest.selftest.logits)


def judge_greedy(expected: Sequence[Reply], found: Sequence[Reply], near_tie: float) -> Finding:
    """Compare continuations; after the first difference each goes its own way.

    Args:
        expected: On the CPU.
        found: On the GPU, of the same prompts.
        near_tie: Margin in logits up to which rounding may decide.
    """
    ties: list[dict[str, Any]] = []
    faults: list[dict[str, Any]] = []
    for index, (left, right) in enumerate(zip(expected, found, strict=True)):
        pairs = zip(left.token_ids, right.token_ids, strict=True)
        at = next((step for step, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            entry = {"prompt": index, "step": at, "margin": left.margins[at]}
            (ties if left.margins[at] <= near_tie else faults).append(entry)
    total = sum(len(path.token_ids) for path in expected)
    figures = {"near_tie": near_tie, "near_ties": ties, "differences": faults, "tokens": total}
    if faults:
        worst = max(faults, key=lambda entry: entry["margin"])
        text = (
            f"prompt {worst['prompt']} parts at step {worst['step']}, where the CPU's first choice "
            f"leads by {worst['margin']:.3g} logits ({near_tie:.3g} is a near tie)"
        )
        return Finding("failed", text, figures)
    if not total:
        return Finding("failed", "no token was compared", figures)
    parted = f", {len(ties)} of them part at a near tie" if ties else ", all equal"
    return Finding("proved", f"{len(expected)} replies of {_STEPS} tokens{parted}", figures)


def _continue(runner: Runner, manifest: Any) -> list[Reply]:
    size = manifest.vocabulary.kept_size or manifest.vocabulary.size
    room = manifest.model.max_context
    steps = min(_STEPS, room - 1)
    lengths = np.minimum(np.array(_PROMPTS, np.int64), room - steps)
    ids = np.random.Generator(np.random.Philox(key=11)).integers(
        0, size, (len(lengths), int(lengths.max()))
    )
    cache = runner.new_cache(len(lengths), int(lengths.max()) + steps)
    hidden = runner.forward(cache, ids, lengths)
    last = hidden[np.arange(len(lengths)), lengths - 1]
    chosen, margins = [], []
    for step in range(steps):
        best, lead = _best(runner, last)
        chosen.append(best)
        margins.append(lead)
        if step + 1 < steps:
            last = runner.forward(cache, best[:, None], np.ones_like(lengths))[:, 0]
    tokens, leads = np.stack(chosen, axis=1), np.stack(margins, axis=1)
    return [
        Reply(tuple(map(int, row)), tuple(map(float, lead)))
        for row, lead in zip(tokens, leads, strict=True)
    ]


def _best(runner: Runner, hidden: npt.NDArray[np.float32]) -> tuple[Int64, Float64]:
    output = runner.head(np.ascontiguousarray(hidden))
    if output.candidates is not None:
        ids, logits = output.candidates.ids, output.candidates.logits
        return ids[:, 0], logits[:, 0] - logits[:, 1]
    assert output.logits is not None
    top = np.partition(output.logits, -2, axis=1)[:, -2:].astype(np.float64)
    return output.logits.argmax(axis=1), top[:, 1] - top[:, 0]
