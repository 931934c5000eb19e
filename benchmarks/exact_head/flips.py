"""Argmax flips of the 8-bit kernel's rounded activations, and what residual rows leave of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from benchmarks.exact_head.bench import DEFAULT, Bench, slices
from headport.quantize.blocks import dequantize_blocks, quantize_blocks
from headport.runner import open_runner

__all__ = ["flips"]

Float64 = npt.NDArray[np.float64]

_GAPS = (np.inf, 0.1, 0.01, 0.001)


def flips(bench: Bench) -> None:
    """Print flips against float64 products with the same weight, by the gap of the best two."""
    rounded = dequantize_blocks(*quantize_blocks(bench.weight, DEFAULT.block), DEFAULT.block)
    runners = {
        kind: open_runner(bench.plain(replace(DEFAULT, activations=kind)), bench.settings, ("lm",))
        for kind in ("rounded", "residual")
    }
    gaps: list[Float64] = []
    flipped: dict[str, list[npt.NDArray[np.bool_]]] = {kind: [] for kind in runners}
    for rows in slices(len(bench.states)):
        exact = bench.states[rows].astype(np.float64) @ rounded.T
        best = np.partition(exact, -2, axis=1)[:, -2:]
        gaps.append(best[:, 1] - best[:, 0])
        for kind, runner in runners.items():
            logits = runner.full_logits(bench.states[rows])
            flipped[kind].append(logits.argmax(axis=1) != exact.argmax(axis=1))
    gap = np.concatenate(gaps)
    print("\n## Argmax flips of the INT8 product against float64, same rounded weight\n")
    print("| gap of the best two logits | positions | one row | residual rows |\n|---|---|---|---|")
    for limit in _GAPS:
        near = gap < limit
        counts = [int(np.concatenate(flipped[kind])[near].sum()) for kind in runners]
        name = "any" if np.isinf(limit) else f"< {limit:g}"
        print(f"| {name} | {int(near.sum())} | {counts[0]} | {counts[1]} |")
