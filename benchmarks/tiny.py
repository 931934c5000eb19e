"""What benchmarks of a tiny random model share: their options, prompts and head line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
import transformers

from tests.conftest import VOCAB_SIZE

__all__ = ["head_line", "part_of", "prompts_of", "read_options"]

_Row = TypeVar("_Row")


def read_options(description: str | None, *, prompts: int, tokens: int) -> argparse.Namespace:
    """`--prompts`, `--tokens`, `--seed`, `--part`; torch then keeps to one thread."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=prompts)
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="", metavar="A/B", help="every B-th row from the A-th on")
    torch.set_num_threads(1)
    return parser.parse_args()


def part_of(rows: Iterable[_Row], part: str) -> Iterator[_Row]:
    """The rows that `--part` asks for, all of them where it says nothing."""
    first, _, step = (part or "1/1").partition("/")
    return islice(rows, int(first) - 1, None, int(step))


def prompts_of(options: argparse.Namespace, longest: int) -> list[list[int]]:
    """Random ids, never the first one; from one to `longest` per prompt."""
    rng = np.random.default_rng(options.seed)
    sizes = rng.integers(1, longest + 1, options.prompts)
    return [rng.integers(1, VOCAB_SIZE, size).tolist() for size in sizes]


def head_line(options: argparse.Namespace) -> str:
    """How much is compared, and with what."""
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return f"{options.prompts} prompts, up to {options.tokens} new tokens, {versions}\n"
