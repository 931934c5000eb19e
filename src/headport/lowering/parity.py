"""Parity: the lowered files against the portable bundle they were made from, both as they run."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import ParityError
from headport.head_parts import all_parts, find_head
from headport.heads import HeadMethods
from headport.lowering.bounds import head_bound
from headport.lowering.head import INTEGERS
from headport.manifest import Head
from headport.progress import bar
from headport.runner import Cache, Runner, open_runner
from headport.session import SessionSettings
from headport.session_runner import read_examples
from headport.source_encoder import example_sources

__all__ = ["HeadParity", "ParityReport", "check_parity", "plan_cases"]

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

# Of the largest magnitude; two right float32 (float16) programs differ by far less.
RELATIVE = {"fp32": 2e-4, "fp16": 2e-2, "bf16": 1e-1}
_REACH = 640  # tokens; windows and contexts below it are crossed
_SHORT = 24
_HEAD_ROWS = 32
_TINY = 1e-30  # keeps a comparison with zeros defined


@dataclass(frozen=True)
class Case:
    """One way to run a batch: new tokens per row, step by step.

    A step is as wide as its longest row, so `steps` also says which rows are idle or padded.
    """

    name: str
    capacity: int  # tokens
    steps: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class HeadParity:
    """A head on the same hidden states: how far apart both forms are."""

    max_abs_logit_error: float  # logits
    largest_share_of_bound: float  # |Δ| divided by what is accepted for that logit; ≤ 1
    accepted: str  # how the accepted difference was found


@dataclass(frozen=True)
class ParityReport:
    """What was compared. Hidden-state errors are relative to their largest magnitude."""

    hidden_states: dict[str, float]  # by case
    hidden_states_limit: float
    heads: dict[str, HeadParity]
    max_abs_logit_error: float  # logits, backbone and head together
    positions: int  # compared
    windows_not_crossed: tuple[int, ...]  # longer than any case

    def __bool__(self) -> bool:
        return bool(
            self.positions
            and all(error <= self.hidden_states_limit for error in self.hidden_states.values())
            and all(head.largest_share_of_bound <= 1 for head in self.heads.values())
        )


def plan_cases(max_context: int, windows: tuple[int, ...]) -> tuple[Case, ...]:
    """Ragged prompts and decode, chunks with idle rows, a full cache, and one row alone.

    Args:
        max_context: Tokens the model can hold.
        windows: Attention windows of its layers, 0 for none.
    """
    crossed = [w + 8 for w in windows if 0 < w <= _REACH]
    longest = max_context if max_context <= _REACH else max(_SHORT, *crossed, 0)
    longest = max(1, min(longest, max_context))
    prompt = max(1, longest - 4)
    short, middle = min(3, prompt), min(9, prompt)
    chunk = max(1, prompt // 3)
    decode = [(1, 1, 1), (1, 0, 1), (1, 1, 0)][: longest - prompt]
    return (
        Case("ragged", longest, ((prompt, short, middle), *decode)),
        Case(
            "chunks",
            longest,
            tuple(
                tuple(min(chunk, max(0, total - start)) for total in (prompt, short, middle))
                for start in range(0, prompt, chunk)
            ),
        ),
        # The second row's chunk is padded over the end of the first row, which it fills exactly.
        Case(
            "full cache",
            prompt,
            ((prompt - 1, 0), (1, min(7, prompt)), (0, prompt - min(7, prompt))),
        ),
        Case("alone", longest, ((prompt,), *[(1,)] * (longest - prompt))),
    )


def check_parity(
    portable: Bundle,
    lowered: Bundle,
    windows: tuple[int, ...],
    settings: SessionSettings | None = None,
    *,
    half_heads: Set[str] = frozenset(),
) -> ParityReport:
    """Run both bundles in every way and compare hidden states, then heads on the same ones.

    Args:
        portable: What was lowered; runs on the CPU.
        lowered: What came out.
        windows: Attention windows of the layers, 0 for none.
        settings: How `lowered` runs.
        half_heads: Heads of `lowered` whose products are in half precision.

    Raises:
        ParityError: If they differ by more than their arithmetic explains.
    """
    manifest = portable.manifest
    cases = plan_cases(manifest.model.max_context, windows)
    with bar(2 * len(cases) + 2, "parity", "run") as progress:
        # One after the other, so that only one of the two is in memory.
        before = _observe(portable, cases, None, progress, None)
        gc.collect()
        after = _observe(lowered, cases, before.rows, progress, settings)
    errors = {
        case.name: _relative_error(found, expected)
        for case, found, expected in zip(cases, after.hidden, before.hidden, strict=True)
    }
    heads = {
        name: _head_parity(
            (portable, lowered),
            name,
            before.states[name],
            expected,
            after.same_logits[name],
            half=name in half_heads,
        )
        for name, expected in before.same_logits.items()
    }
    chained = [
        _largest(after.own_logits[name] - expected) for name, expected in before.own_logits.items()
    ]
    reach = max(sum(row) for case in cases for row in zip(*case.steps, strict=True))
    missed = tuple(sorted({w for w in windows if w >= reach}))
    report = ParityReport(
        hidden_states=errors,
        hidden_states_limit=RELATIVE[manifest.model.dtype],
        heads=heads,
        max_abs_logit_error=max(chained, default=0.0),
        positions=sum(len(expected) for expected in before.hidden),
        windows_not_crossed=missed,
    )
    if not report:
        raise ParityError(_complaint(report))
    return report


def _complaint(report: ParityReport) -> str:
    worst = max(report.hidden_states, key=lambda name: report.hidden_states[name])
    if not report.hidden_states[worst] <= report.hidden_states_limit:
        return (
            f"the lowered backbone does not answer like the portable one: {worst!r} differs by "
            f"{report.hidden_states[worst]:.2g} of the largest hidden state, "
            f"{report.hidden_states_limit:.2g} is accepted; nothing was written"
        )
    name = max(report.heads, key=lambda name: report.heads[name].largest_share_of_bound)
    head = report.heads[name]
    return (
        f"the lowered head {name} does not answer like the portable one: max |Δlogit| "
        f"{head.max_abs_logit_error:.3g}, {head.largest_share_of_bound:.3g} times what is accepted "
        f"({head.accepted}); nothing was written"
    )


@dataclass(frozen=True)
class _Observed:
    """What one bundle answered."""

    hidden: list[Float32]  # per case, all valid positions [positions, H]
    rows: Float32  # a sample of them, [N, H]
    states: dict[str, Float32]  # by head, what its own graph is given for them
    own_logits: dict[str, Float64]  # by head, [N, V], of these rows
    same_logits: dict[str, Float64]  # by head, of rows that both bundles were given


def _observe(
    bundle: Bundle,
    cases: tuple[Case, ...],
    same_rows: Float32 | None,
    progress: Any,
    settings: SessionSettings | None,
) -> _Observed:
    manifest = bundle.manifest
    runner = open_runner(bundle, settings)
    progress.update()
    hidden = []
    sources = example_sources(manifest, np.random.Generator(np.random.Philox(key=4)))
    for case in cases:
        rng = np.random.Generator(np.random.Philox(key=3))
        cache = runner.new_cache(len(case.steps[0]), case.capacity)
        if sources:
            read_examples(runner, cache, sources)
        steps = _step_rows(runner, cache, case, manifest.vocabulary.size, rng)
        hidden.append(np.concatenate(list(steps)))
        progress.update()
    rows = np.concatenate([part[-_HEAD_ROWS:] for part in hidden])
    parts = all_parts(manifest)
    states = {name: _given(runner, head, name, rows) for name, head in parts.items()}
    own = {name: _logits(runner, name, rows) for name in parts}
    if same_rows is None:
        return _Observed(hidden, rows, states, own, own)
    same = {name: _logits(runner, name, same_rows) for name in parts}
    return _Observed(hidden, rows, states, own, same)


def _given(runner: Runner, head: Head, name: str, rows: Float32) -> Float32:
    """What a head's own graph is given for hidden states."""
    if head.transform is None:
        return rows
    assert isinstance(runner, HeadMethods)
    return runner.states(rows, name)


def _step_rows(
    runner: Runner, cache: Cache, case: Case, vocab_size: int, rng: np.random.Generator
) -> Iterator[Float32]:
    for step in case.steps:
        lengths = np.array(step, np.int64)
        ids = rng.integers(0, vocab_size, (len(step), max(1, int(lengths.max()))))
        hidden = runner.forward(cache, ids, lengths)
        for row, length in zip(hidden, lengths, strict=True):
            yield row[:length]


def _relative_error(found: Float32, expected: Float32) -> float:
    return _largest(found - expected) / max(_largest(expected), _TINY)


def _largest(values: npt.NDArray[np.floating]) -> float:
    largest = float(np.abs(values).max(initial=0.0))
    return largest if np.isfinite(largest) else np.inf


def _logits(runner: Runner, name: str, rows: Float32) -> Float64:
    logits = runner.head(rows, name).logits
    if logits is None:  # candidates: what ranks them is what lowering changes
        logits = runner.quantised(rows, name).logits
    return logits.astype(np.float64)


def _head_parity(
    bundles: tuple[Bundle, Bundle],
    name: str,
    rows: Float32,
    expected: Float64,
    found: Float64,
    *,
    half: bool,
) -> HeadParity:
    portable, lowered = bundles
    quantization = find_head(lowered.manifest, name).quantization
    if quantization is not None and quantization.format in INTEGERS and not half:
        bound = head_bound(portable, name, rows.astype(np.float64), quantization.activations)
        accepted = (
            f"bound of {quantization.format} products with {quantization.activations} activations"
        )
    else:
        # Heads compute in float32 whatever the backbone's type, but for those of TensorRT.
        relative = RELATIVE["fp16" if half else "fp32"]
        bound = np.full_like(expected, relative * max(_largest(expected), _TINY))
        accepted = f"{relative:g} of the largest |logit|"
    error = np.abs(found - expected)
    share = np.where(np.isfinite(error), error / bound, np.inf)
    return HeadParity(_largest(error), float(share.max()), accepted)
