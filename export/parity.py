"""Parity: the written files, as ONNX Runtime runs them, against PyTorch.

Each row is run alone and without a cache by the untouched reference, and in several ways by the
bundle: ragged batches, chunks, one token at a time, padded on either side. Random tokens are the
harder test here: every path through the network is as likely as any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headport.bundle import Bundle
from headport.errors import ExportError, ParityError, RunError
from headport.export.checkpoint import run_reference
from headport.export.head_parity import (
    HeadParity,
    HeadReference,
    check_heads,
    compare_heads,
    measure_heads,
)
from headport.export.staged import run_staged
from headport.given_rows import GivenRows
from headport.manifest import Manifest
from headport.progress import track
from headport.runner import Cache, PortableRunner, open_runner
from headport.selftest import write_selftest

__all__ = [
    "RELATIVE",
    "Embedded",
    "ParityPlan",
    "ParityReport",
    "Proof",
    "check_report",
    "largest_error",
    "plan_parity",
    "prove",
    "reference_logits",
    "run_pieces",
]

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

_Cases = dict[str, float]

_WHOLE_BYTES = 640 << 20  # ONNX Runtime holds a graph's weights about twice
_LOGITS_BYTES = 64 << 20  # a longer row asks only for the logits that are compared
_STEPS = 6  # tokens decoded one by one after each prompt
_SINGLE = 24  # tokens of a row that are run one by one
_CHUNK = 5
_LONG = 640  # tokens; a context or window below this is crossed
# Of the largest |logit|; the noise between two correct float32 (float16) programs is far below.
RELATIVE = {"fp32": 2e-4, "fp16": 2e-2, "bf16": 1e-1}


@dataclass(frozen=True)
class ParityPlan:
    """What is run. Row b holds `prompts[b]` prompt tokens and then `_STEPS` more."""

    token_ids: tuple[Int64, ...]  # per row, [n]
    scored: tuple[Int64, ...]  # per row, positions whose logits are compared

    def check_windows(self, windows: tuple[int, ...], max_context: int) -> None:
        """Raise `ExportError` if a window of the graph is within reach but no row crosses it."""
        longest = max(len(row) for row in self.token_ids)
        missed = [w for w in windows if longest <= w < min(_LONG, max_context)]
        if missed:
            raise ExportError(
                f"attention windows of {missed} tokens are in the graph but not in the config, "
                "so no parity run crosses them"
            )

    @property
    def prompts(self) -> Int64:
        """Prompt tokens per row, [B]."""
        return np.array([len(row) - _STEPS for row in self.token_ids])

    @property
    def decode_cuts(self) -> list[Int64]:
        """Cuts for `run_pieces`: the prompts at once, then a token at a time."""
        return [self.prompts + i for i in range(_STEPS + 1)]

    @property
    def single_cuts(self) -> list[Int64]:
        """Cuts for `run_pieces`: a token at a time, of long rows the first ones."""
        rest = np.array([len(row) for row in self.token_ids])
        lengths = np.minimum(rest, _SINGLE)
        cuts = [np.minimum(lengths, n) for n in range(1, int(lengths.max()) + 1)]
        return [*cuts, rest] if rest.max() > _SINGLE else cuts


@dataclass(frozen=True)
class Embedded:
    """What is run with rows of embeddings: the id -1 - k of the plan stands for row k."""

    plan: ParityPlan
    rows: Float32  # [given, E]
    reference: list[Float32]  # logits per row of the plan, at its scored positions

    def known_to(self, rows: GivenRows) -> tuple[ParityPlan, object]:
        """The plan with a runner's own ids, and what must be held while they are used."""
        held = rows.add(self.rows)
        own = np.array(held)
        ids = [np.where(row < 0, own[np.maximum(-1 - row, 0)], row) for row in self.plan.token_ids]
        return replace(self.plan, token_ids=tuple(ids)), held


@dataclass(frozen=True)
class ParityReport:
    """Largest |Δlogit| of each way to run the bundle, and the accepted one."""

    cases: dict[str, float]
    limit: float
    positions: int  # compared per case at most
    max_abs_logit: float  # of the reference
    pieces: int  # in which the backbone ran, one after the other; 1: as a whole
    heads: dict[str, HeadParity] = field(default_factory=dict)  # beside the LM head

    def __bool__(self) -> bool:
        return bool(self.cases or self.heads) and all(
            error <= self.limit for error in self.cases.values()
        )


@dataclass(frozen=True)
class Proof:
    """What was found, and the manifest with the self-test's tolerances."""

    report: ParityReport
    manifest: Manifest


def plan_parity(vocab_size: int, max_context: int, windows: tuple[int, ...]) -> ParityPlan:
    """Choose rows: shorter and longer than the traced example, past windows, up to the context.

    Args:
        vocab_size: Rows of the embedding.
        max_context: Tokens the model can hold.
        windows: Attention windows of the layers, 0 for none.
    """
    longest = max([24, *(w + 8 for w in windows if 0 < w <= _LONG)])
    if max_context <= _LONG:
        longest = max_context
    longest = max(min(longest, max_context), _STEPS + 1)
    wanted = (longest, 2 + _STEPS, 9 + _STEPS, 3 + _STEPS)
    rng = np.random.Generator(np.random.Philox(key=7))
    rows = tuple(rng.integers(0, vocab_size, min(n, longest)) for n in wanted)
    return ParityPlan(rows, tuple(_scored(len(row)) for row in rows))


def _scored(length: int) -> Int64:
    # All positions of a short row; of a long one the last ones and an even spread.
    spread = np.linspace(0, length - 1, 24).astype(np.int64)
    tail = np.arange(max(0, length - 24), length)
    return np.unique(np.concatenate([spread, tail]))


def reference_logits(model: Any, plan: ParityPlan) -> list[Float32]:
    """Logits of the reference at the scored positions, one row at a time, [positions, V]."""
    found = []
    chooses = "logits_to_keep" in inspect.signature(model.forward).parameters
    size = model.get_output_embeddings().weight.shape[0]
    for row, scored in zip(plan.token_ids, plan.scored, strict=True):
        ids, kept = torch.from_numpy(row)[None], torch.from_numpy(scored)
        if chooses and len(row) * size * 4 > _LOGITS_BYTES:
            logits = run_reference(model, input_ids=ids, use_cache=False, logits_to_keep=kept)
            found.append(logits.logits[0].float().numpy())
        else:
            logits = run_reference(model, input_ids=ids, use_cache=False).logits[0]
            found.append(logits[kept].float().numpy())
    return found


def prove(
    bundle: Bundle,
    plan: ParityPlan,
    reference: list[Float32],
    heads: Sequence[HeadReference] = (),
    embedded: Embedded | None = None,
) -> Proof:
    """Run the bundle in every way, compare, and write its self-test.

    A bundle whose weights would take more than `_WHOLE_BYTES` runs piece by piece.

    Args:
        bundle: Not sealed yet.
        plan: What is run.
        reference: Logits of the LM head per row; empty for a bundle without one.
        heads: What the other heads answer.
        embedded: What is run besides, of a backbone that takes rows of embeddings.

    Raises:
        ParityError: If an answer differs by more than rounding explains.
    """

    def work(runner: PortableRunner) -> tuple[_Cases, dict[str, Any], Manifest]:
        cases, others = _run_cases(bundle, runner, plan, reference, heads)
        if embedded is not None:
            cases |= _embedded_cases(bundle, runner, embedded)
        errors = [*cases.values(), *(m[1] for rows in others.values() for m in rows)]
        finite = np.isfinite(errors).all()
        manifest = write_selftest(bundle, runner=runner) if finite else bundle.manifest
        return cases, others, manifest

    pieces = 1
    try:
        if sum(tensor.length for tensor in bundle.manifest.tensors) > _WHOLE_BYTES:
            (cases, others, manifest), pieces = run_staged(bundle, work)
        else:
            runner = open_runner(bundle)
            assert isinstance(runner, PortableRunner)
            cases, others, manifest = work(runner)
    except RunError as error:
        raise ParityError(f"cannot run the written files: {error}") from error
    every = [*reference, *(embedded.reference if embedded else ())]
    largest = max((float(np.abs(rows).max()) for rows in every), default=0.0)
    relative = RELATIVE[bundle.manifest.model.dtype]
    limit = relative * max(1.0, largest)
    report = ParityReport(
        cases,
        limit,
        sum(len(s) for s in plan.scored),
        largest,
        pieces,
        compare_heads(heads, others, relative),
    )
    check_report(report)
    check_heads(report.heads)
    return Proof(report, manifest)


def check_report(report: ParityReport) -> None:
    """Raise `ParityError` naming the worst way to run the bundle, unless all are right."""
    cases = report.cases
    if not report:
        worst = max(cases, key=lambda name: np.nan_to_num(cases[name], nan=np.inf))
        raise ParityError(
            f"the written files do not answer like the checkpoint: {worst} differs by "
            f"{cases[worst]:.3g} in logits, {report.limit:.3g} is accepted; nothing was written"
        )


def _run_cases(
    bundle: Bundle,
    runner: PortableRunner,
    plan: ParityPlan,
    reference: list[Float32],
    heads: Sequence[HeadReference],
) -> tuple[_Cases, dict[str, Any]]:
    cases: _Cases = {}
    others: dict[str, Any] = {}
    for name, run in track(_CASES.items(), "parity", unit="case"):
        hidden = run(runner, plan)
        if reference:
            cases[name] = largest_error(runner, plan, reference, hidden)
        states = [
            np.ascontiguousarray(rows[scored])
            for rows, scored in zip(hidden, plan.scored, strict=True)
        ]
        others[name] = measure_heads(bundle, runner, heads, states)
    return cases, others


def _embedded_cases(bundle: Bundle, runner: PortableRunner, embedded: Embedded) -> _Cases:
    assert runner.given is not None, "the backbone takes rows of embeddings"
    plan, held = embedded.known_to(runner.given)
    cases, _ = _run_cases(bundle, runner, plan, embedded.reference, ())
    del held
    return {f"embeddings_{name}": error for name, error in cases.items()}


def largest_error(
    runner: PortableRunner,
    plan: ParityPlan,
    reference: list[Float32],
    hidden: list[Float32],
) -> float:
    """Largest |Δlogit| of hidden states, per row [n, H], at the positions that are compared."""
    worst = 0.0
    for expected, scored, states in zip(reference, plan.scored, hidden, strict=True):
        logits = runner.head(np.ascontiguousarray(states[scored])).logits
        assert logits is not None
        difference = np.abs(logits - expected)
        worst = max(worst, float(difference.max()) if np.isfinite(difference).all() else np.inf)
    return worst


def _padded(rows: list[Int64]) -> tuple[Int64, Int64]:
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), int(lengths.max(initial=1))), np.int64)
    for b, row in enumerate(rows):
        ids[b, : len(row)] = row
    return ids, lengths


def run_pieces(
    runner: PortableRunner,
    rows: tuple[Int64, ...],
    cuts: list[Int64],
    prepare: Callable[[Cache], object] = lambda _: None,
) -> list[Float32]:
    """Run rows side by side, a piece of each per step.

    Args:
        runner: Runs them.
        rows: Token ids of each.
        cuts: Per step, the tokens that each row has seen after it, [B].
        prepare: Called with the cache before the first step.

    Returns:
        Hidden states per row, [n, H].
    """
    cache = runner.new_cache(len(rows), max(len(row) for row in rows))
    prepare(cache)
    found: list[list[Float32]] = [[] for _ in rows]
    seen = np.zeros(len(rows), np.int64)
    for cut in cuts:
        ids, lengths = _padded([row[a:b] for row, a, b in zip(rows, seen, cut, strict=True)])
        states = runner.forward(cache, ids, lengths)
        for b, n in enumerate(lengths):
            found[b].append(states[b, :n])
        seen = cut
    return [np.concatenate(parts) for parts in found]


def _prefill_and_decode(runner: PortableRunner, plan: ParityPlan) -> list[Float32]:
    return run_pieces(runner, plan.token_ids, plan.decode_cuts)


def _chunked(runner: PortableRunner, plan: ParityPlan) -> list[Float32]:
    lengths = np.array([len(row) for row in plan.token_ids])
    steps = range(_CHUNK, int(lengths.max()) + _CHUNK, _CHUNK)
    return run_pieces(runner, plan.token_ids, [np.minimum(lengths, n) for n in steps])


def _alone(runner: PortableRunner, plan: ParityPlan) -> list[Float32]:
    return [run_pieces(runner, (row,), [np.array([len(row)])])[0] for row in plan.token_ids]


def _one_by_one(runner: PortableRunner, plan: ParityPlan) -> list[Float32]:
    return run_pieces(runner, plan.token_ids, plan.single_cuts)


def _left_padded(runner: PortableRunner, plan: ParityPlan) -> list[Float32]:
    # The portable graph must also serve callers that pad on the left.
    rows, prompts = plan.token_ids, plan.prompts
    width = int(prompts.max())
    cache = runner.new_cache(len(rows), width + _STEPS)
    ids = np.zeros((len(rows), width), np.int64)
    for b, n in enumerate(prompts):
        ids[b, width - n :] = rows[b][:n]
    states = runner.append(cache, ids, np.arange(width) >= width - prompts[:, None])
    found = [[states[b, width - n :]] for b, n in enumerate(prompts)]
    for step in range(_STEPS):
        ids = np.array([[row[n + step]] for row, n in zip(rows, prompts, strict=True)])
        states = runner.append(cache, ids, np.ones(ids.shape, np.bool_))
        for b in range(len(rows)):
            found[b].append(states[b])
    return [np.concatenate(parts) for parts in found]


_CASES: dict[str, Callable[[PortableRunner, ParityPlan], list[Float32]]] = {
    "left_padded": _left_padded,
    "ragged_prefill_and_decode": _prefill_and_decode,
    "chunked": _chunked,
    "alone": _alone,
    "one_by_one": _one_by_one,
}
