"""Time of one decoded token, backbone and head, behind a given past, side by side in one process.

`python -m benchmarks.decode BUNDLE... [--past 256] [--steps 24] [--rounds 8] [--threads 2]` decodes
in slices that take turns in random order, so that a drift of the machine meets all bundles alike.
Each slice first drops two steps. Loading, prefill and the choice of the token are not timed.
`--cpu-time` counts the process's CPU time instead of wall time: with one thread that holds on a
busy machine, where wall time does not. Prints time per token as minimum, first quartile and median,
the ratio of first quartiles to the first bundle, and the largest |Δlogit| to the first bundle on
the same tokens.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.runner import Cache, Runner, open_runner
from headport.session import SessionSettings, library_version

__all__ = ["main"]

_DROPPED = 2  # steps at the start of a slice, which find caches and threads cold


class _Candidate:
    """One bundle that decodes the same tokens again and again behind the same past."""

    def __init__(self, path: Path, past: int, steps: int, threads: int) -> None:
        bundle = Bundle.open(path, verify=False)
        self.name = path.name
        self.runner: Runner = open_runner(bundle, SessionSettings(threads=threads))
        size = bundle.manifest.vocabulary.size
        self.token_ids = np.random.default_rng(0).integers(0, size, (1, past + steps))
        self.past = past
        self.seconds: list[float] = []
        self.logits: npt.NDArray[np.float32] | None = None

    def _prefilled(self) -> Cache:
        cache = self.runner.new_cache(1, self.token_ids.shape[1])
        self.runner.forward(cache, self.token_ids[:, : self.past], np.array([self.past]))
        return cache

    def slice(self, clock: Callable[[], float]) -> None:
        """Decode all steps once; their times and logits are kept."""
        cache, one = self._prefilled(), np.array([1])
        found = []
        for step in range(self.past, self.token_ids.shape[1]):
            start = clock()
            hidden = self.runner.forward(cache, self.token_ids[:, step, None], one)
            logits = self.runner.head(hidden[:, 0]).logits
            elapsed = clock() - start
            assert logits is not None
            found.append(logits[0])
            if step - self.past >= _DROPPED:
                self.seconds.append(elapsed)
        self.logits = np.stack(found)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.decode", description=__doc__)
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE")
    for name, default in (("past", 256), ("steps", 24), ("rounds", 8), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cpu-time", action="store_true")
    found = parser.parse_args(arguments)
    clock = time.process_time if found.cpu_time else time.perf_counter
    candidates = [
        _Candidate(path, found.past, found.steps, found.threads) for path in found.bundles
    ]
    order = np.random.default_rng(1)
    for _ in range(found.rounds):
        for index in order.permutation(len(candidates)):
            candidates[index].slice(clock)
    first = candidates[0]
    base = float(np.quantile(first.seconds, 0.25))
    print(f"{'bundle':<28} {'min':>8} {'q25':>8} {'median':>8} {'ratio':>6} {'max |Δlogit|':>13}")
    for each in candidates:
        low, quarter, middle = (float(np.quantile(each.seconds, q)) for q in (0.0, 0.25, 0.5))
        assert each.logits is not None and first.logits is not None
        apart = float(np.abs(each.logits - first.logits).max())
        print(
            f"{each.name:<28} {low * 1e3:>6.2f}ms {quarter * 1e3:>6.2f}ms {middle * 1e3:>6.2f}ms "
            f"{quarter / base:>6.2f} {apart:>13.2e}"
        )
    print(
        f"past {found.past}, {len(first.seconds)} steps each, {found.threads} threads, "
        f"{'CPU' if found.cpu_time else 'wall'} time; "
        f"{platform.machine()}, Python {platform.python_version()}, "
        f"ONNX Runtime {library_version()}; loading, prefill and sampling not timed"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
