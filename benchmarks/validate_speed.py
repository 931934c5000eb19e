"""What a validation costs beside the reference's own forward pass, and whether memory grows.

    python -m benchmarks.validate_speed CHECKPOINT BUNDLE [--tokens 10000] [--text FILE …]

The reference alone runs the same windows with all CPUs, and its time in forward passes is taken:
that is the least any comparison costs. Then `headport validate` runs with its defaults, twice: on a
quarter of the tokens, or as many as fill a window of each text, since shorter windows take less
memory, and on all of them; loading is left out of the seconds and is in the memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.material import texts
from benchmarks.tree import run_measured
from headport.bundle import Bundle
from headport.machine import usable_cpus
from headport.validate.candidate import Candidate
from headport.validate.comparison import jobs_of, prepare
from headport.validate.documents import read_texts
from headport.validate.reference_process import ReferenceProcess

__all__ = ["main"]

_WINDOW = 1024
_CHARACTERS_PER_TOKEN = 6  # more than any of the texts has
_MOST_TIMES = 2.0
_MOST_GROWTH = 1.1


@dataclass(frozen=True)
class Run:
    """One validation."""

    tokens: int
    seconds: dict[str, float]  # of the report
    peak_rss_bytes: int  # both processes

    @property
    def total(self) -> float:
        """Seconds of scoring, greedy runs, split and noise floor."""
        return self.seconds["total"] + self.seconds["greedy"] + self.seconds["extra"]


def forward_seconds(model: str, bundle: Path, files: list[Path], tokens: int) -> float:
    """Seconds that the reference spends in forward passes of the same windows, alone."""
    candidate = Candidate(Bundle.open(bundle), threads=1)
    materials = prepare(read_texts(files), candidate, tokens)
    rows = candidate.block_rows
    del candidate
    with ReferenceProcess(model, usable_cpus()) as reference:
        reference.ready()
        for job in jobs_of(materials, _WINDOW):
            reference.ask_score(job.window.token_ids)
            for _ in reference.read_score(rows):
                pass
        return reference.seconds


def validated(model: str, bundle: Path, files: list[Path], tokens: int, folder: Path) -> Run:
    """`headport validate` with its defaults."""
    report = folder / f"{tokens}.json"
    measured = run_measured(
        *("validate", str(bundle), "--reference", model, "--text", *map(str, files)),
        *("--max-tokens", str(tokens), "--json", str(report), "--quiet"),
    )
    if not report.is_file():
        raise SystemExit(f"{measured.command}\n{measured.output}")
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return Run(found["tokens_scored"], found["timing"], measured.peak_rss_bytes)


def main(arguments: list[str] | None = None) -> int:
    """Print the figures; exit 1 if a bound is broken."""
    parser = argparse.ArgumentParser(prog="benchmarks.validate_speed", description=__doc__)
    parser.add_argument("model", metavar="CHECKPOINT")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--text", type=Path, nargs="+", default=[], metavar="FILE")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = given.text or texts(folder, given.tokens * _CHARACTERS_PER_TOKEN // 3)
        started = time.perf_counter()
        alone = forward_seconds(given.model, given.bundle, files, given.tokens)
        fewer = max(given.tokens // 4, len(files) * _WINDOW * 4 // 3)
        runs = [
            validated(given.model, given.bundle, files, tokens, folder)
            for tokens in (fewer, given.tokens)
        ]
        spent = time.perf_counter() - started
    short, whole = runs
    times = whole.total / alone
    growth = whole.peak_rss_bytes / short.peak_rss_bytes
    print(f"{whole.tokens} tokens, {usable_cpus()} CPUs, {spent:.0f} s in all")
    print(f"reference's forward passes alone: {alone:.1f} s")
    print(f"validation: {whole.total:.1f} s, {times:.2f} times that (bound {_MOST_TIMES:g})")
    print("  " + ", ".join(f"{part} {seconds:.1f} s" for part, seconds in whole.seconds.items()))
    print(
        f"peak memory of both processes: {short.peak_rss_bytes / 1e6:.0f} MB for {short.tokens} "
        f"tokens, {whole.peak_rss_bytes / 1e6:.0f} MB for {whole.tokens} (× {growth:.3f}, bound "
        f"{_MOST_GROWTH:g})"
    )
    return int(times > _MOST_TIMES or growth > _MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
