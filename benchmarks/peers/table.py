"""From the turns of all processes to ratios and one table."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.peers.child import Variant, stored_bytes
from headport.session import library_version

__all__ = ["Measured", "exact_of", "ratios", "render"]


@dataclass
class Measured:
    """One variant."""

    variant: Variant
    threads: int
    option: str  # of the variant's `tries`, beside the number of threads
    tried: dict[str, float]  # threads and option → seconds of a step
    load_s: float
    nll: list[float]  # empty of a pruned model
    first: list[int]
    rounds: list[float] = field(default_factory=list)  # median step of each round, seconds
    steps: list[float] = field(default_factory=list)
    prefills: list[float] = field(default_factory=list)
    peak_rss_bytes: int = 0

    def add_round(self, turns: Sequence[dict[str, Any]], dropped: int) -> None:
        """Take one turn of each of its processes."""
        steps = [second for turn in turns for second in turn["step_s"][dropped:]]
        self.steps += steps
        self.rounds.append(float(np.median(steps)))
        self.prefills += [turn["prefill_s"] for turn in turns]
        self.peak_rss_bytes = max([self.peak_rss_bytes, *(t["peak_rss_bytes"] for t in turns)])

    def quality(self, exact: Measured | None) -> tuple[float | None, float | None]:
        """Perplexity ratio and share of places with the same first token; None where not known.

        Args:
            exact: What to compare with; None where it was not run.
        """
        if exact is None or not self.first:
            return None, None
        same = float(np.mean(np.array(self.first) == np.array(exact.first)))
        if not self.nll:
            return None, same
        return float(np.exp(np.mean(self.nll) - np.mean(exact.nll))), same

    def record(self, exact: Measured | None) -> dict[str, Any]:
        """What the JSON file holds of it."""
        drift, same = self.quality(exact)
        return {
            "perplexity_ratio": drift,
            "top1_agreement": same,
            "name": self.variant.name,
            "threads": self.threads,
            "option": self.option,
            "tried_ms": {name: 1e3 * seconds for name, seconds in self.tried.items()},
            "load_s": self.load_s,
            "step_ms": [1e3 * second for second in self.steps],
            "prefill_ms": [1e3 * second for second in self.prefills],
            "peak_rss_bytes": self.peak_rss_bytes,
            "stored_bytes": stored_bytes(self.variant.path),
        }


def exact_of(measured: Sequence[Measured]) -> Measured | None:
    """The variant that quality is measured against; None where it was not run."""
    return next((each for each in measured if each.variant.name == "torch_fp32"), None)


def ratios(measured: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Peer ÷ first bundle, round by round: median and percentiles 10 and 90; of prompts too."""
    base = next(each for each in measured if each.variant.file == "bundle.py")
    found = {}
    for each in measured:
        pairs = np.array(each.rounds) / np.array(base.rounds)
        low, middle, high = np.quantile(pairs, (0.1, 0.5, 0.9)).tolist()
        prompts = float(np.median(np.array(each.prefills) / np.array(base.prefills)))
        found[each.variant.name] = {"step": middle, "low": low, "high": high, "prefill": prompts}
    return found


def render(
    measured: Sequence[Measured], given: argparse.Namespace, arguments: Sequence[str]
) -> str:
    """A Markdown table and what it was taken with."""
    exact = exact_of(measured)
    against = ratios(measured)
    lines = [
        "| | step × (10–90 %) | prompt × | step ms (p10–p90) | prompt ms | PPL ratio | top-1 "
        "| peak RSS MB | stored MB | threads, option |",
        "|" + "---|" * 10,
    ]
    for each in measured:
        ratio, steps = against[each.variant.name], 1e3 * np.array(each.steps)
        low, high = np.quantile(steps, (0.1, 0.9))
        lines.append(
            f"| {each.variant.name} | {ratio['step']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f}) "
            f"| {ratio['prefill']:.2f} | {np.median(steps):.1f} ({low:.1f}–{high:.1f}) "
            f"| {1e3 * np.median(each.prefills):.0f} | {_quality(*each.quality(exact))} "
            f"| {each.peak_rss_bytes / 1e6:.0f} | {stored_bytes(each.variant.path) / 1e6:.0f} "
            f"| {each.threads} {each.option} |"
        )
    places = len(measured[0].first)
    command = f"python -m benchmarks.peers {' '.join(arguments)}"
    lines.append(
        f"\n× is against {given.bundles[0].name}, above 1 slower; {given.rounds} rounds of "
        f"{given.processes} processes each, {given.steps} steps behind {given.past} tokens; "
        f"quality on {places} positions, fed one by one; ONNX Runtime {library_version()}, "
        f"{platform.machine()}; `{command}`"
    )
    return "\n".join(lines)


def _quality(drift: float | None, same: float | None) -> str:
    return " | ".join(
        "–" if value is None else shown.format(value)
        for value, shown in ((drift, "{:.4f}"), (same, "{:.1%}"))
    )
