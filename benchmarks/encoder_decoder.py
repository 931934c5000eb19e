"""Encoder-decoder bundles against transformers: replies equal, and how long both take, tiny models.

`python -m benchmarks.encoder_decoder [--prompts 50] [--tokens 12] [--part 1/11]` exports a random
checkpoint of each kind, lowers it to ort-cpu, and answers sources of all lengths greedily and with
4 beams: through the portable bundle, the lowered one, and `transformers.generate`, one source at a
time on one thread. A reply that differs is listed with both; the exit code is 1 if there is one.
The models are so small that times are those of the programs around them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.tiny import head_line, part_of, read_options
from headport.export.command import Options as ExportOptions
from headport.export.command import export
from headport.lowering.command import Options as LowerOptions
from headport.lowering.command import lower
from headport.runtime import Generator
from tests.sourced.models import MODELS, load, reply_of_transformers, save_sourced, sources

__all__ = ["main"]

_BEAMS = (1, 4)


def main() -> int:
    """Run all kinds, greedy and with beams."""
    options = read_options(__doc__, prompts=50, tokens=12)
    torch.set_num_threads(1)
    print(head_line(options))
    print("| model | beams | bundle | replies | ids equal | tokens/s | tokens/s of transformers |")
    print("|---|---|---|---|---|---|---|")
    wrong = 0
    for name in part_of(MODELS, options.part):
        with tempfile.TemporaryDirectory() as folder:
            wrong += _compare(name, Path(folder), options)
    return 1 if wrong else 0


def _compare(name: str, folder: Path, options: argparse.Namespace) -> int:
    checkpoint = save_sourced(folder / "model", name, options.seed)
    portable = export(ExportOptions(model=str(checkpoint), output=folder / "portable")).path
    fast = lower(LowerOptions(bundle=portable, output=folder / "ort-cpu", target="ort-cpu")).path
    model, given = load(checkpoint), sources(name, options.prompts, options.seed)
    wrong = 0
    for beams in _BEAMS:
        limits = {"max_new_tokens": options.tokens, "num_beams": beams}
        ask = partial(_reply_of_transformers, model, limits)
        wanted, slow = _timed(ask, given)
        for path in (portable, fast):
            with Generator(path, threads=1) as generator:
                found, speed = _timed(partial(_reply, generator, limits), given)
            odd = [n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
            for n in odd:
                print(f"differs: {name} {limits} {given[n]}: {found[n]} instead of {wanted[n]}")
            wrong += len(odd)
            row = (name, beams, path.name, len(given), len(given) - len(odd), speed, slow)
            print(f"| {' | '.join(map(str, row))} |", flush=True)
    return wrong


def _reply_of_transformers(model: Any, limits: dict[str, int], source: Any) -> list[int]:
    return reply_of_transformers(model, source, do_sample=False, **limits)[0]


def _reply(generator: Generator, limits: dict[str, int], source: Any) -> list[int]:
    return generator.generate([source], **limits)[0].token_ids


def _timed(answer: Callable[[Any], list[int]], given: list[Any]) -> tuple[list[list[int]], int]:
    """Replies, and new tokens per second; the first source is asked once before."""
    answer(given[0])
    start = time.perf_counter()
    found = [answer(source) for source in given]
    return found, round(sum(map(len, found)) / (time.perf_counter() - start))


if __name__ == "__main__":
    sys.exit(main())
