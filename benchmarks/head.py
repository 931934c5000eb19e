"""One cold step of a head against reading its bytes once, equally cold, in one run.

`python -m benchmarks.head BUNDLE... [--threads 1] [--rounds 40]` takes lowered bundles of one model
that differ in their heads. In every round each head computes one row, and a buffer of as many bytes
as that head reads is read once, in random order; before each of them 256 MiB are written, which no
cache holds. Reading is the faster of two ways: BLAS `sdot` of a buffer with itself, one slice per
thread, and ONNX Runtime's product of one row and a float32 matrix of that many bytes. Prints the
step in milliseconds (median and first quartile), the reading, reading ÷ step, and each step against
the first bundle's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx_ir as ir

from headport.bundle import Bundle
from headport.heads import HeadSessions
from headport.session import SessionSettings, library_version, open_session

__all__ = ["in_turns", "main", "product", "reading", "restarted"]

_EVICT_BYTES = 1 << 28
_PRODUCT_ROWS = 512
_HEAD = "lm"
_CHILD = "HEADPORT_BENCHMARK_CHILD"


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.head", description=__doc__)
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    found = parser.parse_args(arguments)
    done = restarted("benchmarks.head", arguments)
    if done is not None:
        return done
    print(_table(found.bundles, found.threads, found.rounds))
    return 0


def restarted(module: str, arguments: list[str] | None) -> int | None:
    """Run a benchmark in a process where BLAS keeps to one thread; None inside that process.

    BLAS reads how many threads it may start when NumPy is imported: one for each slice that
    `reading` makes.
    """
    if _CHILD in os.environ:
        return None
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", _CHILD: "1"}
    command = [sys.executable, "-m", module, *(arguments or sys.argv[1:])]
    return subprocess.run(command, env=environment, check=False).returncode


def _table(paths: list[Path], threads: int, rounds: int) -> str:
    bundles = [Bundle.open(path, verify=False) for path in paths]
    sizes = [_read_bytes(bundle) for bundle in bundles]
    actions: list[Callable[[], object]] = [_step(bundle, threads) for bundle in bundles]
    with ThreadPoolExecutor(threads) as pool:
        actions += [reading(size, pool, threads) for size in sizes]
        actions += [product(size, threads) for size in sizes]
        seconds = in_turns(actions, rounds)
    n = len(bundles)
    steps, sums, products = seconds[:n], seconds[n : 2 * n], seconds[2 * n :]
    readings = [min(pair, key=_median) for pair in zip(sums, products, strict=True)]
    lines = [
        "| head | read MB | step ms (first quartile) | reading ms | reading ÷ step | × first |",
        "|---|---|---|---|---|---|",
    ]
    for path, size, step, whole in zip(paths, sizes, steps, readings, strict=True):
        (median, quartile), read = _summary(step), _summary(whole)[0]
        lines.append(
            f"| {path.name} | {size / 1e6:.1f} | {1e3 * median:.2f} ({1e3 * quartile:.2f}) | "
            f"{1e3 * read:.2f} | {read / median:.2f} | {median / _summary(steps[0])[0]:.2f} |"
        )
    lines.append(
        f"\none row, {rounds} rounds, {threads} threads, caches emptied before each; ONNX Runtime "
        f"{library_version()}"
    )
    return "\n".join(lines)


def _read_bytes(bundle: Bundle) -> int:
    head = bundle.manifest.heads[_HEAD]
    # Of the original weight of a head that gives candidates only some rows are read.
    original = None if head.candidates is None else head.candidates.original
    return sum(
        t.length
        for t in bundle.manifest.tensors
        if t.name != original and any(c.startswith(f"{head.graph}:") for c in t.consumers)
    )


def _step(bundle: Bundle, threads: int) -> Callable[[], object]:
    heads = HeadSessions(bundle, SessionSettings(threads=threads), (_HEAD,))
    row = np.random.default_rng(0).normal(size=(1, bundle.manifest.model.hidden_size))
    hidden = row.astype(np.float32)
    return lambda: heads.head(hidden, _HEAD)


def reading(size: int, pool: ThreadPoolExecutor, threads: int) -> Callable[[], object]:
    """Reads `size` bytes once, as products of a buffer with itself, a slice per thread."""
    slices = np.array_split(np.ones(size // 4, np.float32), threads)
    return lambda: list(pool.map(lambda part: np.dot(part, part), slices))


def product(size: int, threads: int) -> Callable[[], object]:
    """Reads `size` bytes once, as ONNX Runtime's product of one row and a float32 matrix."""
    rows, columns = _PRODUCT_ROWS, size // (4 * _PRODUCT_ROWS)
    weight = ir.Value(name="weight", const_value=ir.tensor(np.ones((rows, columns), np.float32)))
    x = ir.val("x", ir.DataType.FLOAT, [1, rows])
    y = ir.val("y", ir.DataType.FLOAT, [1, columns])
    node = ir.node("MatMul", [x, weight], outputs=[y])
    graph = ir.Graph([x], [y], nodes=[node], initializers=[weight], opset_imports={"": 20})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "product.onnx"
        ir.save(ir.Model(graph, ir_version=10), file)
        session = open_session(file, {}, SessionSettings(threads=threads))
    row = np.ones((1, rows), np.float32)
    return lambda: session.run({"x": row}, ("y",))


def in_turns(actions: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of each action in each round, in random order, caches emptied before each."""
    evict = np.zeros(_EVICT_BYTES // 8)
    seconds: list[list[float]] = [[] for _ in actions]
    order = np.random.default_rng(1)
    for number in range(rounds + 2):
        for index in order.permutation(len(actions)):
            evict += 1.0
            start = time.perf_counter()
            actions[index]()
            if number >= 2:  # the first ones find threads asleep
                seconds[index].append(time.perf_counter() - start)
    return seconds


def _median(seconds: list[float]) -> float:
    return float(np.median(seconds))


def _summary(seconds: list[float]) -> tuple[float, float]:
    return _median(seconds), float(np.quantile(seconds, 0.25))


if __name__ == "__main__":
    sys.exit(main())
