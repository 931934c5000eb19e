"""Faults in the files of quantised bundles, judged by the gates of their own recipes.

The tensors of a quantised weight W [V, H] are its integers [V, H], its scales [V, blocks] and, for
asymmetric 4-bit numbers, its zero points [V, blocks]; 4-bit numbers lie in pairs, low half first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headport.validate.gates import DEFAULT_GATES
from tests.validate.planted.row import KL, PERPLEXITY, exchange, row, weight

__all__ = ["BUNDLES", "ROWS", "TOP1"]

TOP1 = "top1_agreement"
ALL = {TOP1, PERPLEXITY, KL}
# name → options of `headport quantize`, recipe whose gates judge, gates that hold without a fault.
# Rounded states flip more first choices of a random model, whose logits are flat, than of a trained
# one: top-1 is left out there.
BUNDLES: dict[str, tuple[dict[str, Any], str, set[str]]] = {
    "int8": ({"head": "int8", "block": 32}, "int8", ALL),
    "int8-row": ({"head": "int8-row"}, "int8-row", ALL),
    "int4": ({"head": "int4", "block": 16, "asymmetric": True}, "int4", {PERPLEXITY, KL}),
    "candidates": ({"head": "int8", "block": 32, "rescore": 16}, "int8", ALL),
    "int8 backbone": ({"backbone": "int8", "backbone_block": 32}, "int8", {PERPLEXITY, KL}),
    "int8 embedding": ({"embedding": "int8", "embedding_block": 32}, "int8", {PERPLEXITY, KL}),
}
assert all(recipe in DEFAULT_GATES for _, recipe, _ in BUNDLES.values())


def _rolled(values: Any) -> Any:
    return np.roll(values, 1, 0)


def _with_swapped_rows(values: Any) -> Any:
    values[[3, 40, 90, 7]] = values[[40, 3, 7, 90]]
    return values


def _half_of_each_block(values: Any) -> Any:
    """Only the first 16 numbers of each block of 32 were written."""
    values.reshape(len(values), -1, 2, 16)[:, :, 1] = 0
    return values


def _one_scale_for_all_blocks(scales: Any) -> Any:
    return np.repeat(scales[:, :1], scales.shape[1], axis=1)


def _as_unsigned(values: Any) -> Any:
    return np.clip(values.astype(np.int16) + 128, -128, 127)


def _halves_exchanged(pairs: Any) -> Any:
    return pairs >> 4 | pairs << 4


def _other(values: Any) -> Any:
    """Integers of another matrix: of a bundle made from another checkpoint."""
    return np.random.default_rng(5).permutation(values.ravel()).reshape(values.shape)


def _wild(scales: Any) -> Any:
    scales[::2] *= 4
    return scales


HEAD, SCALE, ZERO = "lm_head.weight.int8", "lm_head.weight.scale", "lm_head.weight.zero"
NIBBLES = "lm_head.weight.uint4"
DOWN, EMBEDDING = "1.mlp.down_proj.weight", "embed_tokens.weight"
ROWS = (
    row("scales of the next row", "int8", weight(SCALE, _rolled), ALL, "head"),
    row("scales 5 % too large", "int8", weight(SCALE, lambda s: s * 1.05), {KL}, "head"),
    row("every second row's scale wrong", "int8-row", weight(SCALE, _wild), ALL, "head"),
    row("one scale for all blocks", "int8", weight(SCALE, _one_scale_for_all_blocks), {KL}, "head"),
    row("rows swapped, scales not", "int8", weight(HEAD, _with_swapped_rows), {KL}, "head"),
    row("block halved", "int8", weight(HEAD, _half_of_each_block), ALL, "head"),
    row("signed read as unsigned", "int8", weight(HEAD, _as_unsigned), ALL, "head"),
    row("stale integers", "int8", weight(HEAD, _other), ALL, "head"),
    row("stale integers", "int8-row", weight(HEAD, _other), {TOP1, KL}, "head"),
    row("zero points lost", "int4", weight(ZERO, lambda z: z * 0), {KL}, "head"),
    row("zero points of the next row", "int4", weight(ZERO, _rolled), {KL}, "head"),
    row("halves of the bytes exchanged", "int4", weight(NIBBLES, _halves_exchanged), {KL}, "head"),
    row("stale integers", "int4", weight(NIBBLES, _other), {PERPLEXITY, KL}, "head"),
    row("stale integers beside candidates", "candidates", weight(HEAD, _other), ALL, "head"),
    row(
        "scales of one layer doubled",
        "int8 backbone",
        weight(f"{DOWN}.scale", lambda s: s * 2),
        {KL},
        "backbone",
    ),
    row(
        "integers of another layer",
        "int8 backbone",
        exchange("0.mlp.down_proj.weight.int8", "1.mlp.down_proj.weight.int8"),
        {KL},
        "backbone",
    ),
    row(
        "scales of the next row",
        "int8 embedding",
        weight(f"{EMBEDDING}.scale", _rolled),
        {KL},
        "backbone",
    ),
)
