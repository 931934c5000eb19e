"""What benchmarks of a tiny random model share: their options, prompts and head line."""

from __future__ import annotations

import argparse

import numpy as np
import torch
import transformers

from tests.conftest import VOCAB_SIZE

__all__ = ["head_line", "prompts_of", "read_options"]


def read_options(description: str | None, *, prompts: int, tokens: int) -> argparse.Namespace:
    """`--prompts`, `--tokens` and `--seed`; torch then keeps to one thread."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=prompts)
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)
    return parser.parse_args()


def prompts_of(options: argparse.Namespace, longest: int) -> list[list[int]]:
    """Random ids, never the first one; from one to `longest` per prompt."""
    rng = np.random.default_rng(options.seed)
    sizes = rng.integers(1, longest + 1, options.prompts)
    return [rng.integers(1, VOCAB_SIZE, size).tolist() for size in sizes]


def head_line(options: argparse.Namespace) -> str:
    """How much is compared, and with what."""
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return f"{options.prompts} prompts, up to {options.tokens} new tokens, {versions}\n"
