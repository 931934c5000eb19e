"""Samplers held against the reference's: the same logits, the same noise, the same tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from headport.runtime.sampling.filters import keep
from headport.runtime.sampling.noise import NoiseKey
from headport.runtime.sampling.sampler import choose
from headport.runtime.sampling.settings import Sampling
from headport.validate.comparison import Job
from headport.validate.evidence import SamplerCase, SamplerParity
from headport.validate.sides import ReferenceSide
from headport.validate.wire import Draw, Drawn, SamplingCase

__all__ = ["GRID", "RUNTIMES", "chi_squared_p", "sampler_parity"]

Float32 = npt.NDArray[np.float32]
Key = tuple[int, int, int]
Choose = Callable[[Float32, SamplingCase, Key], int]
Keep = Callable[[Float32, SamplingCase], int]

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
)
_FREE = SamplingCase(1.0, top_k=20)
_POSITIONS = 8
_DRAWS = 4  # per position and case
_FREE_ROWS, _FREE_DRAWS = 3, 1500
_LEAST_P = 1e-3  # after correction for the number of rows
_SEEDS = (0, 7, 2**32 + 5, 2**64 - 1)


def _python_choose(logits: Float32, case: SamplingCase, key: Key) -> int:
    seed, step, sample = key
    ids = np.arange(len(logits), dtype=np.int64)
    return choose(logits, ids, _sampling(case), NoiseKey(seed, step, sample))


def _python_keep(logits: Float32, case: SamplingCase) -> int:
    return 1 if case.temperature == 0 else len(keep(logits, _sampling(case)))


def _sampling(case: SamplingCase) -> Sampling:
    return Sampling(case.temperature, case.top_k, case.top_p, case.min_p)


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
        asked = Draw(tuple(job.window.token_ids.tolist()), GRID, keys, _FREE)
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
        reference="transformers' warpers in float64, Philox4x64-10 by the paper",
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
    if case.temperature == 0:
        return "greedy"
    parts = [f"temperature {case.temperature:g}"]
    parts += [f"top_k {case.top_k}"] if case.top_k else []
    parts += [f"top_p {case.top_p:g}"] if case.top_p < 1 else []
    parts += [f"min_p {case.min_p:g}"] if case.min_p else []
    return ", ".join(parts)


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
