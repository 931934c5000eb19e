"""Decode beside the peers, each in its own process, with quality beside it.

    python -m benchmarks.peers BUNDLE... [--torch CHECKPOINT]
        [--genai FOLDER...] [--optimum FOLDER...] [--peer-python PYTHON]
        [--llama FILE...] [--llama-python PYTHON]
        [--past 256] [--steps 24] [--rounds 8] [--processes 2] [--threads 1 2]
        [--text FILE] [--score-tokens 384] [--json FILE]

BUNDLEs are lowered; FOLDERs are what the peers' own builders made of the same checkpoint, FILEs
what `benchmarks/peers/make_gguf.py` made of it, and PYTHON is an interpreter that has the peer
installed. Every variant first tries the numbers of threads with each of its options (Optimum with
and without I/O binding, llama.cpp with and without flash attention) and keeps the fastest. Then all
processes take turns in random order: a prompt of `--past` tokens, and as many steps of one given
token each, up to logits on the host; the first two steps of a turn are dropped. Ratios are
peer ÷ first bundle, round by round. Quality is of the same text for all, fed one token at a time:
perplexity against torch in float32 (not of a pruned bundle, whose probabilities are shares of fewer
tokens), and how often the likeliest token is the same. Without `--torch`, or with
`--score-tokens 0`, none is measured, as for random weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.child import Child, Variant
from benchmarks.peers.table import Measured, exact_of, ratios, render
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
    scored = _scored(given, bundle)
    variants = list(_variants(given))
    names = [each.name for each in variants]
    if len(set(names)) < len(names):
        raise SystemExit(f"benchmarks.peers: names that differ were expected, {names} found")
    measured = [_measured(each, given.threads, work, scored) for each in variants]
    children = [
        Child(each.variant, each.threads, each.option)
        for each in measured
        for _ in range(given.processes)
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
        records = [each.record(exact_of(measured)) for each in measured]
        found = {"ratios": ratios(measured), "variants": records}
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def _read(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE")
    parser.add_argument("--torch", type=Path, metavar="CHECKPOINT")
    for name, metavar in (("genai", "FOLDER"), ("optimum", "FOLDER"), ("llama", "FILE")):
        parser.add_argument(f"--{name}", type=Path, nargs="*", default=[], metavar=metavar)
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--llama-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--text", type=Path, help="what quality is measured on")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path)
    numbers = (("past", 256), ("steps", 24), ("rounds", 8), ("processes", 2), ("score-tokens", 384))
    for name, default in numbers:
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(arguments)


def _scored(given: argparse.Namespace, bundle: Bundle) -> list[int]:
    if given.torch is None:  # nothing to compare with
        return []
    text = given.text.read_text(encoding="utf-8") if given.text else _TEXT * 20
    return Tokens(bundle).encode(text)[: given.score_tokens]


def _variants(given: argparse.Namespace) -> Iterator[Variant]:
    dtypes = (("float32", "fp32"), ("bfloat16", "bf16")) if given.torch else ()
    for dtype, short in dtypes:
        yield Variant(f"torch_{short}", "torch_model.py", given.torch, (dtype,))
    for folder in given.bundles:
        yield Variant(folder.name, "bundle.py", folder)
    peers = (
        ("genai", "genai.py", given.genai, ("",), given.peer_python),
        ("optimum", "optimum_model.py", given.optimum, ("unbound", "bound"), given.peer_python),
        ("llama_cpp", "llama_model.py", given.llama, ("off", "on"), given.llama_python),
    )
    for peer, file, paths, tries, python in peers:
        for path in paths:
            plain = len(paths) == 1 and path.is_dir()  # a file is named after what it holds
            name = peer if plain else f"{peer}_{path.stem}"
            yield Variant(name, file, path, tries, python)


def _measured(
    variant: Variant, threads: Sequence[int], work: dict[str, Any], scored: list[int]
) -> Measured:
    """The variant with its fastest number of threads and option, and its quality."""
    tried: dict[str, float] = {}
    best: Child | None = None
    for count, option in itertools.product(threads, variant.tries):
        child = Child(variant, count, option)
        turns = [child.ask("decode", **work)["step_s"][_DROPPED:] for _ in range(2)]
        seconds = float(np.median(turns))
        slower = best is not None and seconds > min(tried.values())
        tried[f"{count} {option}".strip()] = seconds
        if slower:
            child.close()
            continue
        if best is not None:
            best.close()
        best = child
    assert best is not None
    nothing: dict[str, Any] = {"nll": [], "first": []}
    quality = best.ask("score", token_ids=scored) if scored else nothing
    best.close()
    shown = ", ".join(f"{name}: {1e3 * seconds:.1f} ms" for name, seconds in tried.items())
    print(f"{variant.name}: tried {shown}", file=sys.stderr)
    return Measured(
        variant=variant,
        threads=best.threads,
        option=best.tried,
        tried=tried,
        load_s=best.load_s,
        nll=quality["nll"],
        first=quality["first"],
    )


if __name__ == "__main__":
    sys.exit(main())
