"""Decode beside the peers, each in its own process, with quality beside it.

    python -m benchmarks.peers BUNDLE... --torch CHECKPOINT [--genai FOLDER] [--optimum FOLDER]
        [--peer-python PYTHON] [--past 256] [--steps 24] [--rounds 8] [--processes 2]
        [--threads 1 2] [--json FILE]

BUNDLEs are lowered; FOLDERs are what the peers' own builders made of the same checkpoint, and
PYTHON is an interpreter that has them installed. Every variant first tries the numbers of threads
and keeps the fastest. Then all processes take turns in random order: a prompt of `--past` tokens,
and as many steps of one given token each, up to logits on the host; the first two steps of a turn
are dropped. Ratios are peer ÷ first bundle, round by round. Quality is of the same text for all,
fed one token at a time: perplexity against torch in float32, and how often the likeliest token is
the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.child import Child, Variant
from benchmarks.peers.table import Measured, ratios, render
from headport.bundle import Bundle
from headport.runtime.text import Tokens

__all__ = ["main"]

_DROPPED = 2
_TEXT = (
    "def area(width, height):\n    return width * height\n\nThe patient was seen in the clinic for "
    "a cough that had lasted three weeks. When in the course of human events it becomes necessary "
)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    given = _read(arguments)
    random = np.random.default_rng(0)
    bundle = Bundle.open(given.bundles[0], verify=False)
    ids = random.integers(0, bundle.manifest.vocabulary.size, given.past + given.steps).tolist()
    work = {"past": ids[: given.past], "steps": ids[given.past :]}
    text = given.text.read_text(encoding="utf-8") if given.text else _TEXT * 20
    scored = Tokens(bundle).encode(text)[: given.score_tokens]
    measured = [_measured(v, given.threads, work, scored) for v in _variants(given)]
    children = [
        Child(each.variant, each.threads) for each in measured for _ in range(given.processes)
    ]
    for _ in range(given.rounds):
        taken: dict[str, list[dict[str, Any]]] = {each.variant.name: [] for each in measured}
        for n in random.permutation(len(children)):
            taken[children[n].variant.name].append(children[n].ask("decode", **work))
        for each in measured:
            each.add_round(taken[each.variant.name], _DROPPED)
    for child in children:
        child.close()
    print(render(measured, given, sys.argv[1:] if arguments is None else arguments))
    if given.json:
        found = {"ratios": ratios(measured), "variants": [each.record() for each in measured]}
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def _read(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE")
    parser.add_argument("--torch", type=Path, metavar="CHECKPOINT", required=True)
    parser.add_argument("--genai", type=Path, nargs="*", default=[], metavar="FOLDER")
    parser.add_argument("--optimum", type=Path, nargs="*", default=[], metavar="FOLDER")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--text", type=Path, help="what quality is measured on")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path)
    numbers = (("past", 256), ("steps", 24), ("rounds", 8), ("processes", 2), ("score-tokens", 384))
    for name, default in numbers:
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(arguments)


def _variants(given: argparse.Namespace) -> Iterator[Variant]:
    for dtype in ("float32", "bfloat16"):
        yield Variant(f"torch {dtype}", "torch_model.py", given.torch, (dtype,))
    for folder in given.bundles:
        yield Variant(folder.name, "bundle.py", folder)
    for file, folders in (("genai.py", given.genai), ("optimum_model.py", given.optimum)):
        for folder in folders:
            yield Variant(folder.name, file, folder, python=given.peer_python)


def _measured(
    variant: Variant, threads: Sequence[int], work: dict[str, Any], scored: list[int]
) -> Measured:
    """The variant with its fastest number of threads, and its quality."""
    tried, best = {}, None
    for count in threads:
        child = Child(variant, count)
        turns = [child.ask("decode", **work)["step_s"][_DROPPED:] for _ in range(2)]
        tried[count] = float(np.median(turns))
        if tried[count] > min(tried.values()):
            child.close()
            continue
        if best is not None:
            best.close()
        best = child
    assert best is not None
    quality = best.ask("score", token_ids=scored)
    best.close()
    print(f"{variant.name}: threads tried {tried}", file=sys.stderr)
    return Measured(variant, best.threads, tried, best.load_s, quality["nll"], quality["first"])


if __name__ == "__main__":
    sys.exit(main())
