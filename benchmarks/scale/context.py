"""What earlier tokens and further rows add to a step."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.peers.child import Child
from benchmarks.scale.turns import NOISE, in_turns, open_child
from headport.bundle import Bundle

__all__ = ["grows_with_batch", "grows_with_context"]

_STEPS = 12
_SHORTEST = 256
_ROWS = (1, 2, 4, 8)
_BEND = 1.25  # how much steeper the longer half of the line may be


def grows_with_context(bundle: Path, threads: int, rounds: int) -> bool:
    """Print step and prompt by length; true if steps grow no faster than a straight line."""
    most = Bundle.open(bundle, verify=False).manifest.model.max_context
    pasts = [_SHORTEST]
    while 2 * pasts[-1] + _STEPS <= most:
        pasts.append(2 * pasts[-1])
    if len(pasts) < 3:
        raise SystemExit(
            f"{bundle}: a context of {4 * _SHORTEST + _STEPS} tokens was expected, so that three "
            f"lengths can be compared, {most} found"
        )
    child = open_child(bundle, threads)
    prompts = child.ask("fill", pasts=pasts, capacity=pasts[-1] + _STEPS)["prefill_s"]
    actions = {str(past): partial(_steps, child, [n]) for n, past in enumerate(pasts)}
    seconds = in_turns(actions, rounds)
    child.close()
    medians = [float(np.median(seconds[str(past)])) for past in pasts]
    print("| tokens before | step ms | beyond the shortest, µs per token | prompt ms | per token |")
    print("|---|---|---|---|---|")
    for past, middle, prompt in zip(pasts, medians, prompts, strict=True):
        added = (middle - medians[0]) / max(1, past - pasts[0])
        print(
            f"| {past} | {1e3 * middle:.2f} | {1e6 * added:.2f} | {1e3 * prompt:.0f} | "
            f"{1e3 * prompt / past:.2f} |"
        )
    middle = len(pasts) // 2
    first, second = (
        (medians[stop] - medians[start]) / (pasts[stop] - pasts[start])
        for start, stop in ((0, middle), (middle, -1))
    )
    bend = second / first if first > 0 else float("inf")
    passed = bend <= _BEND
    print(
        f"\n{1e6 * first:.2f} µs per token up to {pasts[middle]}, {1e6 * second:.2f} beyond: "
        f"{bend:.2f} × (at most {_BEND}): {'straight' if passed else 'BENT'}"
    )
    return passed


def grows_with_batch(bundle: Path, threads: int, rounds: int) -> bool:
    """Print the step of several rows at once; true if none costs more than one row alone.

    More means beyond what two processes of the same bundle differ by.
    """
    child = open_child(bundle, threads)
    child.ask("fill", pasts=[_SHORTEST] * _ROWS[-1], capacity=_SHORTEST + _STEPS)
    actions = {str(rows): partial(_steps, child, list(range(rows))) for rows in _ROWS}
    seconds = in_turns(actions, rounds)
    child.close()
    alone = float(np.median(seconds["1"]))
    print("| rows | step ms | per row ms | × one alone |")
    print("|---|---|---|---|")
    shares = []
    for rows in _ROWS:
        middle = float(np.median(seconds[str(rows)]))
        shares.append(middle / rows / alone)
        print(f"| {rows} | {1e3 * middle:.2f} | {1e3 * middle / rows:.2f} | {shares[-1]:.2f} |")
    return max(shares[1:]) <= NOISE


def _steps(child: Child, slots: list[int]) -> list[float]:
    found: list[float] = child.ask("steps", slots=slots, count=_STEPS)["step_s"]
    return found
