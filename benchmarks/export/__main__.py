"""What it takes to get from a checkpoint to a model that runs, beside the peers' own builders.

    python -m benchmarks.export CHECKPOINT [--optimum-python PYTHON] [--genai-python PYTHON]
        [--rows NAME...] [--rounds 1] [--work FOLDER] [--json FILE]

Each command is a process of its own, and rows take turns. Seconds are of all commands of a row,
from start to exit; memory is the highest of the process tree of any of them; bytes are those of
what runs in the end, tokenizers left out. headport's export holds what it wrote against the
checkpoint before it ends, and each later stage answers its self-test; the peers' rows include what
they check by default (Optimum compares outputs on one dummy batch, the GenAI builder nothing).
Everything written is deleted.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.peers.child import stored_bytes
from benchmarks.tree import run_command

__all__ = ["main"]

_HEADPORT = ("{headport}", "-m", "headport")
_EXPORT = (*_HEADPORT, "export", "{checkpoint}", "-o", "{work}/portable", "--quiet")
_BUILDER = ("{genai}", "-m", "onnxruntime_genai.models.builder", "-i", "{checkpoint}")
_LOWER = ("-o", "{work}/result", "--target", "ort-cpu", "--quiet")


def _quantised(*options: str) -> tuple[tuple[str, ...], ...]:
    made = (*_HEADPORT, "quantize", "{work}/portable", "-o", "{work}/small", "--quiet", *options)
    return _EXPORT, made, (*_HEADPORT, "lower", "{work}/small", *_LOWER)


# Row → commands, one after the other; the last one writes {work}/result.
ROWS: dict[str, tuple[tuple[str, ...], ...]] = {
    "headport fp32": (_EXPORT, (*_HEADPORT, "lower", "{work}/portable", *_LOWER)),
    "headport int8": _quantised("--backbone", "int8", "--head", "int8"),
    "headport int4": _quantised("--backbone", "int4", "--head", "int8"),
    "optimum fp32": (
        (
            *("{optimum}", "-m", "optimum.exporters.onnx", "--model", "{checkpoint}"),
            *("--task", "text-generation-with-past", "{work}/result"),
        ),
    ),
    "genai fp32": ((*_BUILDER, "-p", "fp32", "-e", "cpu", "-c", "{work}", "-o", "{work}/result"),),
    "genai int4": ((*_BUILDER, "-p", "int4", "-e", "cpu", "-c", "{work}", "-o", "{work}/result"),),
}


@dataclass(frozen=True)
class Cost:
    """What one row took, once."""

    seconds: float
    peak_rss_bytes: int
    stored_bytes: int


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    for peer in ("optimum", "genai"):
        parser.add_argument(
            f"--{peer}-python", default=sys.executable, help=f"an interpreter that has {peer}"
        )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--work", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    found = parser.parse_args(arguments)
    pythons = {
        "headport": sys.executable,
        "optimum": found.optimum_python,
        "genai": found.genai_python,
    }
    costs: dict[str, list[Cost]] = {name: [] for name in found.rows}
    order = np.random.default_rng(0)
    for _ in range(found.rounds):
        for name in order.permutation(found.rows).tolist():
            print(f"{name} …", file=sys.stderr)
            costs[name].append(_cost(name, found.checkpoint, pythons, found.work))
    print(_table(costs))
    if found.json:
        rows = {name: [asdict(cost) for cost in each] for name, each in costs.items()}
        found.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def _cost(name: str, checkpoint: Path, pythons: dict[str, str], parent: Path | None) -> Cost:
    work = Path(tempfile.mkdtemp(prefix="export-", dir=parent))
    places = {"checkpoint": str(checkpoint.absolute()), "work": str(work), **pythons}
    seconds, peak = 0.0, 0
    try:
        for command in ROWS[name]:
            done = run_command([part.format(**places) for part in command])
            if done.exit_code:
                raise SystemExit(f"{done.command}\n{done.output}")
            seconds += done.seconds
            peak = max(peak, done.peak_rss_bytes)
        return Cost(seconds, peak, stored_bytes(work / "result"))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _table(costs: dict[str, list[Cost]]) -> str:
    lines = ["| row | seconds (least, most) | peak RSS MB | stored MB |", "|---|---|---|---|"]
    for name, each in costs.items():
        seconds = [cost.seconds for cost in each]
        peak = max(cost.peak_rss_bytes for cost in each)
        lines.append(
            f"| {name} | {np.median(seconds):.1f} ({min(seconds):.1f}, {max(seconds):.1f}) | "
            f"{peak / 1e6:.0f} | {each[0].stored_bytes / 1e6:.0f} |"
        )
    rounds = len(next(iter(costs.values())))
    lines.append(
        f"\n{rounds} rounds, {platform.machine()}, Python {platform.python_version()}; the files "
        "of the checkpoint were read before"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
