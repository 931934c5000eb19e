"""Every way to store SmolLM2's head: size, drift and step, on the off-grid twin.

`python -m benchmarks.quantise_head --work FOLDER` exports the twin once, writes three kinds of text
in two halves that share nothing, compensates errors on the first and measures on the second, and
prints `headport sweep`'s table, beside it the factor by which compensation lowers the KL and how
much longer a one-row step takes than reading the head's bytes once.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.material import texts, twin
from headport.progress import say
from headport.quantize.sweep import Options, SweepReport, sweep
from headport.quantize.sweep_report import render_markdown

__all__ = ["main"]

_CHARACTERS = 24000  # of each kind of text, half to calibrate and half to measure
_PAIRS = (
    ("head=int8-row", "head=int8-row,compensated"),
    ("head=int8,block=64", "head=int8,block=64,compensated"),
    ("head=int4,block=32", "head=int4,block=32,compensated"),
)


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.quantise_head", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("out/quantise_head"))
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--threads", type=int, default=0)
    found = parser.parse_args()
    found.work.mkdir(parents=True, exist_ok=True)
    bundle = _exported(found.work)
    calibration, measured = _halves(found.work)
    start = time.perf_counter()
    report = sweep(
        Options(
            bundle=bundle,
            text=measured,
            calibration=calibration,
            tokens=found.tokens,
            threads=found.threads,
        )
    )
    seconds = time.perf_counter() - start
    print(render_markdown(msgspec.to_builtins(report)))
    _compensation(report)
    _reading(report)
    print(
        f"\n{len(report.trials)} recipes in {seconds:.0f} s, of which "
        f"{report.seconds_backbone:.0f} s for the backbone; slowest recipe "
        f"{max(t.seconds for t in report.trials):.1f} s"
    )
    return 0


def _exported(work: Path) -> Path:
    folder = work / "fp32"
    if not folder.is_dir():
        from headport.export.command import Options as ExportOptions
        from headport.export.command import export

        say("exporting the twin …")
        export(ExportOptions(model=str(twin(work / "twin")), output=folder))
    return folder


def _halves(work: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    calibration, measured = [], []
    for file in texts(work / "texts", _CHARACTERS):
        whole = file.read_text(encoding="utf-8")
        middle = whole.rfind("\n", 0, len(whole) // 2) + 1
        for part, kind, kept in (
            (whole[:middle], "calibration", calibration),
            (whole[middle:], "measured", measured),
        ):
            target = work / f"{file.stem}.{kind}.txt"
            target.write_text(part, encoding="utf-8")
            kept.append(target)
    return tuple(calibration), tuple(measured)


def _compensation(report: SweepReport) -> None:
    kl = {trial.recipe: trial.kl_mean for trial in report.trials}
    print("\n| recipe | KL, nearest | KL, compensated | factor |\n|---|---|---|---|")
    for plain, compensated in _PAIRS:
        ratio = kl[plain] / kl[compensated]
        print(f"| {plain} | {kl[plain]:.1e} | {kl[compensated]:.1e} | {ratio:.1f} |")


def _reading(report: SweepReport) -> None:
    """Step of each head by the time of summing its bytes once from memory, both cold."""
    print("\n| recipe | step ms | reading its bytes once, ms | step ÷ reading |\n|---|---|---|---|")
    for trial in report.trials:
        reading = 1e3 * _read_seconds(trial.read_bytes)
        print(
            f"| {trial.recipe} | {trial.step_ms:.2f} | {reading:.2f} | "
            f"{trial.step_ms / reading:.1f} |"
        )


def _read_seconds(count: int) -> float:
    # Buffers in turn, so that every pass finds its own pushed out of the caches.
    buffers = [np.ones(max(1, count // 8), np.float64) for _ in range(6)]
    seconds = []
    for turn in range(18):
        start = time.perf_counter()
        buffers[turn % len(buffers)].sum()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[6:]))


if __name__ == "__main__":
    sys.exit(main())
