"""Samplers held against the reference's: the same logits, the same noise, the same tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.runtime.sampling.filters import keep
from headport.runtime.sampling.noise import NoiseKey
from headport.runtime.sampling.sampler import choose, process
from headport.runtime.sampling.settings import Context, FixedIds, Sampling
from headport.validate.comparison import Job
from headport.validate.evidence import SamplerCase, SamplerParity
from headport.validate.sides import ReferenceSide
from headport.validate.wire import Draw, Drawn, SamplingCase

__all__ = ["GRID", "RUNTIMES", "chi_squared_p", "context_of", "sampler_parity", "sampling_of"]

Float32 = npt.NDArray[np.float32]
Key = tuple[int, int, int]
Choose = Callable[[Float32, SamplingCase, Key], int]
Keep = Callable[[Float32, SamplingCase], int]

_PAST: dict[str, Any] = {
    "prompt": (4, 9, 4, 11),
    "reply": (9, 9, 2, 4, 9),
    "eos_token_ids": (3, 17),
}
# Logits that make what the past holds likely, so that rules about it matter in any vocabulary.
_LIKELY = (((6,), 12.0), ((9,), 11.0), ((4,), 10.5), ((2,), 10.0), ((11,), 10.0))
GRID = (
    SamplingCase(0.0),
    SamplingCase(0.3),
    SamplingCase(0.8),
    SamplingCase(1.0),
    SamplingCase(1.7),
    SamplingCase(1.0, top_k=1),
    SamplingCase(1.0, top_k=5),
    SamplingCase(0.8, top_k=50),
    SamplingCase(1.0, top_p=0.1),
    SamplingCase(1.0, top_p=0.5),
    SamplingCase(0.7, top_p=0.95),
    SamplingCase(1.0, min_p=0.02),
    SamplingCase(1.5, min_p=0.2),
    SamplingCase(0.9, top_k=40, top_p=0.9),
    SamplingCase(1.2, top_k=40, top_p=0.95, min_p=0.05),
    SamplingCase(1.0, typical_p=0.3),
    SamplingCase(0.8, typical_p=0.9),
    SamplingCase(1.0, epsilon_cutoff=0.01),
    SamplingCase(1.3, eta_cutoff=0.02),
    SamplingCase(1.4, top_k=50, top_p=0.98, typical_p=0.9, epsilon_cutoff=1e-3, eta_cutoff=1e-3),
    SamplingCase(0.0, repetition_penalty=3.0, **_PAST),
    SamplingCase(1.0, repetition_penalty=0.6, **_PAST),
    SamplingCase(1.0, presence_penalty=3.0, frequency_penalty=-2.0, logit_bias=_LIKELY, **_PAST),
    SamplingCase(0.9, repetition_penalty=1.3, frequency_penalty=1.0, top_p=0.9, **_PAST),
    SamplingCase(1.0, logit_bias=(((5,), 8.0), ((9, 6), 9.0), ((9, 7, 8), 20.0)), **_PAST),
    SamplingCase(1.0, no_repeat_ngram_size=2, top_k=9, logit_bias=_LIKELY, **_PAST),
    SamplingCase(1.0, bad_words=((2, 9, 1), (9, 6), (3,)), logit_bias=_LIKELY, **_PAST),
    SamplingCase(0.0, no_repeat_ngram_size=1, logit_bias=_LIKELY, **_PAST),
    SamplingCase(1.0, min_new_tokens=9, logit_bias=(((3,), 30.0),), **_PAST),
    SamplingCase(1.0, allowed=(1, 2, 3, 9, 11, 40), repetition_penalty=1.5, **_PAST),
    SamplingCase(1.0, suppress_tokens=tuple(range(0, 90, 2)), begin_suppress_tokens=(1, 3)),
)
_FREE = SamplingCase(1.0, top_k=20)
_POSITIONS = 8
_DRAWS = 4  # per position and case
_FREE_ROWS, _FREE_DRAWS = 3, 1500
_LEAST_P = 1e-3  # after correction for the number of rows
_SEEDS = (0, 7, 2**32 + 5, 2**64 - 1)


def sampling_of(case: SamplingCase) -> Sampling:
    """The runtime's parameters of a case."""
    own = {
        each.name: getattr(case, each.name) for each in fields(Sampling) if hasattr(case, each.name)
    }
    return Sampling(**(own | {"allowed": FixedIds(case.allowed) if case.allowed else None}))


def context_of(case: SamplingCase) -> Context:
    """The past that a case names."""
    return Context(case.prompt, case.reply, case.eos_token_ids)


def _python_choose(logits: Float32, case: SamplingCase, key: Key) -> int:
    seed, step, sample = key
    ids = np.arange(len(logits), dtype=np.int64)
    noise = NoiseKey(seed, step, sample)
    return choose(logits, ids, sampling_of(case), noise, context_of(case))


def _python_keep(logits: Float32, case: SamplingCase) -> int:
    if case.temperature == 0:
        return 1
    ids = np.arange(len(logits), dtype=np.int64)
    sampling = sampling_of(case)
    scores, _ = process(logits, ids, sampling, context_of(case))
    return len(keep(scores, sampling))


# runtime → (how it chooses, how many tokens its filters leave)
RUNTIMES: dict[str, tuple[Choose, Keep]] = {"python": (_python_choose, _python_keep)}


def sampler_parity(jobs: Sequence[Job], reference: ReferenceSide) -> SamplerParity | None:
    """Hold every runtime's sampler against transformers' filters and the paper's noise.

    Args:
        jobs: Windows whose last positions give the logits.
        reference: The reference, with nothing asked.

    Returns:
        None without a window. `failed` if one token, or the number of kept tokens, differs, or if
        free draws do not follow the distribution.
    """
    rows, answers = [], []
    keys = tuple((seed, step, step % 3) for step, seed in enumerate(_SEEDS[:_DRAWS]))
    for job in list(jobs)[:_POSITIONS]:
        fed = tuple(job.window.token_ids.tolist())
        asked = Draw(fed, GRID, keys, _FREE, job.document.source)
        drawn, logits = reference.draw(asked)
        rows.append(logits)
        answers.append(drawn)
    if not rows:
        return None
    drawn_from = list(zip(rows, answers, strict=True))
    cases = [
        _case(name, index, keys, drawn_from) for name in RUNTIMES for index in range(len(GRID))
    ]
    p_values = [
        _free_running(runtime[0], logits, drawn)
        for runtime in RUNTIMES.values()
        for logits, drawn in zip(rows[:_FREE_ROWS], answers, strict=False)
    ]
    p_value = min(1.0, min(p_values) * len(p_values))
    equal = all(case.equal == case.draws and not case.first_difference for case in cases)
    return SamplerParity(
        reference="transformers' processors in float64, Philox4x64-10 by the paper",
        positions=len(rows),
        cases=tuple(cases),
        distribution=(
            f"{_FREE_DRAWS} free draws from each of {len(p_values)} rows at "
            f"{_words(_FREE)}, χ² corrected for their number"
        ),
        distribution_p_value=p_value,
        verdict="passed" if equal and p_value >= _LEAST_P else "failed",
    )


def _case(
    runtime: str, index: int, keys: Sequence[Key], rows: Sequence[tuple[Float32, Drawn]]
) -> SamplerCase:
    case, (choose_token, count_kept) = GRID[index], RUNTIMES[runtime]
    equal, first = 0, ""
    for position, (logits, drawn) in enumerate(rows):
        kept, wanted_kept = count_kept(logits, case), drawn.kept[index]
        if kept != wanted_kept and not first:
            first = f"position {position}: {wanted_kept} tokens kept expected, {kept} found"
        for key, wanted in zip(keys, drawn.tokens[index], strict=True):
            found = choose_token(logits, case, key)
            equal += found == wanted
            if found != wanted and not first:
                first = f"position {position}, seed {key[0]}: {wanted} expected, {found} found"
    return SamplerCase(
        runtime=runtime,
        parameters=_words(case),
        draws=len(rows) * len(keys),
        equal=equal,
        first_difference=first,
    )


def _words(case: SamplingCase) -> str:
    given = {name: getattr(case, name) for name in case.__struct_fields__ if name not in _PAST}
    neutral = SamplingCase(1.0)
    said = [
        f"{name} {_short(value)}"
        for name, value in given.items()
        if name != "temperature" and value != getattr(neutral, name)
    ]
    first = f"temperature {case.temperature:g}" if case.temperature else "greedy"
    return ", ".join([first, *said])


def _short(value: Any) -> str:
    return f"of {len(value)}" if isinstance(value, tuple) else f"{value:g}"


def _free_running(choose_token: Choose, logits: Float32, drawn: Drawn) -> float:
    """p-value of free draws against the reference's distribution."""
    counts = Counter(choose_token(logits, _FREE, (seed, 0, 0)) for seed in range(_FREE_DRAWS))
    expected = {token: _FREE_DRAWS * p for token, p in drawn.distribution}
    if set(counts) - set(expected):
        return 0.0
    # Cells with little expectation are joined, as the test wants five in each.
    bins: list[list[float]] = [[0.0, 0.0]]
    for token, share in sorted(expected.items(), key=lambda item: item[1]):
        if bins[-1][1] >= 5:
            bins.append([0.0, 0.0])
        bins[-1][0] += counts[token]
        bins[-1][1] += share
    if len(bins) > 1 and bins[-1][1] < 5:
        seen, share = bins.pop()
        bins[-1] = [bins[-1][0] + seen, bins[-1][1] + share]
    statistic = sum((seen - share) ** 2 / share for seen, share in bins)
    return chi_squared_p(statistic, len(bins) - 1)


def chi_squared_p(statistic: float, freedom: int) -> float:
    """Probability of a larger χ², within 2e-3 for the values that matter.

    Source: Wilson & Hilferty 1931, PNAS 17(12).
    """
    if freedom < 1:
        return 1.0
    spread = 2 / (9 * freedom)
    return 1 - NormalDist().cdf((math.cbrt(statistic / freedom) - (1 - spread)) / math.sqrt(spread))
