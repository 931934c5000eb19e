"""Whether earlier requests make later ones slower or larger."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.peers.child import Child
from benchmarks.scale.turns import NOISE, in_turns, open_child

__all__ = ["independent_of_earlier_requests"]

_PAST, _STEPS = 64, 24
_GROWTH_BYTES = 8 << 20


def independent_of_earlier_requests(bundle: Path, threads: int, rounds: int, requests: int) -> bool:
    """Hold a process that has answered many requests against fresh ones, in turns.

    Args:
        bundle: Lowered.
        threads: Of each process.
        rounds: Requests of each process that are compared.
        requests: Requests that the old one has answered before.

    Returns:
        Whether it takes no longer for a token, within what identical processes differ by, and
        whether its memory stayed where it was after the first tenth of its requests.
    """
    old = open_child(bundle, threads)
    after_tenth = 0
    for number in range(requests):
        _request(old)
        if number == requests // 10:
            after_tenth = old.ask("memory")["VmRSS"]
    grown = old.ask("memory")["VmRSS"] - after_tenth
    fresh = {f"fresh {n}": open_child(bundle, threads) for n in (1, 2)}
    for child in fresh.values():
        _request(child)  # opens its slots
    actions = {name: partial(_request, child) for name, child in fresh.items()}
    seconds = in_turns({"old": partial(_request, old)} | actions, rounds)
    for child in (old, *fresh.values()):
        child.close()
    medians = {name: 1e3 * float(np.median(each)) for name, each in seconds.items()}
    shown = ", ".join(f"{name} {middle:.2f} ms" for name, middle in medians.items())
    ratio = medians["old"] / np.mean([medians[name] for name in fresh])
    passed = bool(ratio <= NOISE) and grown <= _GROWTH_BYTES
    print(
        f"a token of a request of {_PAST} + {_STEPS}: {shown}; the old one had answered "
        f"{requests} requests: {ratio:.2f} × (at most {NOISE}); its memory grew by "
        f"{grown / 1e6:.1f} MB over the last {requests - requests // 10} of them (at most "
        f"{_GROWTH_BYTES / 1e6:.1f}): {'independent' if passed else 'GROWING'}"
    )
    return passed


def _request(child: Child) -> list[float]:
    found: list[float] = child.ask("request", past=_PAST, count=_STEPS)["step_s"]
    return found
