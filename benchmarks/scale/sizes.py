"""Step, prompt and memory of models that differ in one size."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.peers.child import Child
from benchmarks.scale.models import Sizes, bundle_of
from benchmarks.scale.stored import read_bytes, weight_bytes
from benchmarks.scale.turns import in_turns, open_child

__all__ = ["GROWING", "compare_sizes"]

GROWING: dict[str, tuple[Sizes, ...]] = {
    "vocabulary": tuple(Sizes(vocab=v, hidden=256) for v in (16_384, 65_536, 262_144)),
    "hidden": tuple(Sizes(hidden=h) for h in (256, 512, 1024, 2048)),
    "layers": tuple(Sizes(layers=n) for n in (2, 4, 8, 16)),
    "large": (Sizes(vocab=262_144, hidden=640, layers=18),),
}
_PAST, _STEPS = 256, 16


def compare_sizes(models: Sequence[Sizes], weights: str, threads: int, rounds: int) -> bool:
    """Make the models, run them in turns, print a row for each."""
    work = Path(tempfile.mkdtemp(prefix="scale-"))
    try:
        bundles = {str(sizes): bundle_of(sizes, work, weights) for sizes in models}
        children = {name: open_child(bundle, threads) for name, bundle in bundles.items()}
        prompts = {name: _prompt(child) for name, child in children.items()}
        actions = {name: partial(_steps, child) for name, child in children.items()}
        seconds = in_turns(actions, rounds)
        resident = {name: child.ask("memory")["VmRSS"] for name, child in children.items()}
        for child in children.values():
            child.close()
        print(
            "| model | weights MB | of it read per step | step ms (p10–p90) | GB/s "
            f"| prompt of {_PAST}, ms | RSS MB |"
        )
        print("|" + "---|" * 7)
        for sizes in models:
            name = str(sizes)
            low, middle, high = 1e3 * np.quantile(seconds[name], (0.1, 0.5, 0.9))
            read = read_bytes(bundles[name]) / 1e6
            print(
                f"| {name} | {weight_bytes(bundles[name]) / 1e6:.0f} | {read:.0f} | {middle:.2f} "
                f"({low:.2f}–{high:.2f}) | {read / middle:.1f} | {1e3 * prompts[name]:.0f} | "
                f"{resident[name] / 1e6:.0f} |"
            )
        return True
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _prompt(child: Child) -> float:
    ask = partial(child.ask, "fill", pasts=[_PAST], capacity=_PAST + _STEPS)
    return min(ask()["prefill_s"][0] for _ in range(2))


def _steps(child: Child) -> list[float]:
    found: list[float] = child.ask("steps", slots=[0], count=_STEPS)["step_s"]
    return found
