"""Faults in the files of fp32 bundles: weights, graphs, attributes."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.validate import sabotage
from tests.validate.planted.row import KL, LOGITS, TOP1, attention, exchange, row, weight

__all__ = ["ROWS"]

ALL = {LOGITS, KL, TOP1}


def _rounded_to_4_bits(w: Any) -> Any:
    step = np.abs(w).max(axis=1, keepdims=True) / 7
    return np.round(w / step) * step


def _with_zero_row(w: Any) -> Any:
    w[0] = 0
    return w


def _half_and_back(w: Any) -> Any:
    """The largest weights overflow in fp16 and are clamped to its largest number."""
    scaled = np.clip(w * 2.0**17, -65504, 65504)
    return scaled / 2.0**17


def _rolled(w: Any) -> Any:
    return np.roll(w, 1, 0)


ROWS = (
    row("bias dropped", "phi", sabotage.drop_bias, ALL, "head"),
    row("scale dropped", "cohere", sabotage.drop_scale, {LOGITS, KL}, "head"),
    row("softcap dropped", "gemma", sabotage.drop_softcap, {LOGITS, KL}, "head"),
    row("two rows swapped", "llama", sabotage.swap_rows, {LOGITS, KL}, "head"),
    row("head data of another bundle", "llama", sabotage.other_head, ALL, "head"),
    row("head 1 % too large", "llama", weight("lm_head", lambda w: w * 1.01), {LOGITS, KL}, "head"),
    row("rows moved by one (wrong map)", "llama", weight("lm_head", _rolled), ALL, "head"),
    row("one row zero", "llama", weight("lm_head", _with_zero_row), {LOGITS, KL}, "head"),
    row("head secretly in 4 bits", "llama", weight("lm_head", _rounded_to_4_bits), ALL, "head"),
    row(
        "fp16 overflow in the head",
        "llama",
        weight("lm_head", _half_and_back),
        {LOGITS, KL},
        "head",
    ),
    row(
        "columns of the head reversed",
        "llama",
        weight("lm_head", lambda w: w[:, ::-1]),
        ALL,
        "head",
    ),
    row("one bit flipped", "llama", sabotage.flip_bit, {LOGITS, KL}, "backbone"),
    row("embedding moved by one row", "llama", weight("embed", _rolled), ALL, "backbone"),
    row(
        "embedding 5 % too large",
        "llama",
        weight("embed", lambda w: w * 1.05),
        {LOGITS, KL},
        "backbone",
    ),
    row("layers exchanged", "llama", exchange("0.mlp.up", "1.mlp.up"), ALL, "backbone"),
    row("gate and up exchanged", "llama", exchange("0.mlp.gate", "0.mlp.up"), ALL, "backbone"),
    row(
        "key and value exchanged",
        "llama",
        exchange("0.self_attn.k_proj", "0.self_attn.v_proj"),
        ALL,
        "backbone",
    ),
    row(
        "output projection lost",
        "llama",
        weight("1.self_attn.o_proj", lambda w: w * 0),
        ALL,
        "backbone",
    ),
    row("attention scale doubled", "llama", attention("scale", lambda v: v * 2), ALL, "backbone"),
    row("window lost", "gemma", attention("window", lambda _: 64), {LOGITS, KL}, "backbone"),
    row(
        "attention softcap widened",
        "gemma",
        attention("softcap", lambda v: v * 8),
        {LOGITS, KL},
        "backbone",
    ),
)
