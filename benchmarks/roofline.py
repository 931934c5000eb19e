"""A decode step against reading once what it must read, in one process.

    python -m benchmarks.roofline BUNDLE... [--past 256] [--threads 2] [--rounds 20]

A step of one sequence reads every weight of backbone and head, and the keys and values of all
tokens before it; of the embedding it reads one row. Reading is the faster of two ways, as in
`benchmarks.head`: BLAS `sdot` of a buffer with itself, one slice per thread, and ONNX Runtime's
product of one row and a float32 matrix of that many bytes. Steps and readings take turns in random
order, processor caches emptied before each. Prints reading ÷ step, 1 being the limit.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.head import in_turns, product, reading, restarted
from benchmarks.scale.stored import read_bytes
from headport.bundle import Bundle
from headport.runner import open_runner
from headport.runtime.scheduling.capacity import slot_bytes
from headport.session import SessionSettings, library_version
from headport.slots import open_slots

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.roofline", description=__doc__)
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE")
    for name, default in (("past", 256), ("threads", 2), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    found = parser.parse_args(arguments)
    done = restarted("benchmarks.roofline", arguments)
    if done is not None:
        return done
    print("| bundle | weights + caches MB | step ms | reading ms | GB/s | reading ÷ step |")
    print("|---|---|---|---|---|---|")
    for path in found.bundles:
        print(_row(path, found.past, found.threads, found.rounds))
    print(
        f"\n{found.past} tokens before, {found.rounds} rounds, {found.threads} threads, caches "
        f"emptied before each; ONNX Runtime {library_version()}, {platform.machine()}"
    )
    return 0


def _row(path: Path, past: int, threads: int, rounds: int) -> str:
    bundle = Bundle.open(path, verify=False)
    weights, caches = read_bytes(path), slot_bytes(bundle, past)
    size = weights + caches
    with ThreadPoolExecutor(threads) as pool:
        actions = [_step(bundle, past, threads), reading(size, pool, threads)]
        actions.append(product(size, threads))
        step, *readings = (float(np.median(each)) for each in in_turns(actions, rounds))
    read = min(readings)
    return (
        f"| {path.name} | {weights / 1e6:.0f} + {caches / 1e6:.0f} | {1e3 * step:.2f} | "
        f"{1e3 * read:.2f} | {size / read / 1e9:.1f} | {read / step:.2f} |"
    )


def _step(bundle: Bundle, past: int, threads: int) -> Callable[[], object]:
    runner = open_runner(bundle, SessionSettings(threads=threads))
    slots = open_slots(runner, 1, past + 1)
    ids = np.random.default_rng(0).integers(0, bundle.manifest.vocabulary.size, (1, past + 1))
    slots.forward([0], ids[:, :past], np.array([past]))

    def action() -> object:
        hidden = slots.forward([0], ids[:, past:], np.array([1]))
        slots.cut(0, past)
        return runner.head(hidden[:, 0])

    return action


if __name__ == "__main__":
    sys.exit(main())
