"""Repetition loops at the end of greedy continuations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headport.validate.analysis.records import LoopRun
from headport.validate.candidate import Candidate
from headport.validate.comparison import Material
from headport.validate.greedy import grouped_prompts
from headport.validate.sides import ReferenceSide
from headport.validate.worst import shorten

__all__ = ["loop_period", "loops"]

_REPEATS = 3
_LEAST_TOKENS = 8


def loop_period(token_ids: Sequence[int]) -> int | None:
    """Tokens of what a sequence repeats at its end, at least three times and over eight tokens.

    Args:
        token_ids: New tokens, in order.
    """
    ids = np.asarray(token_ids)
    for period in range(1, len(ids) // _REPEATS + 1):
        different = np.flatnonzero(ids[period:] != ids[:-period])
        same = len(ids) - period - (int(different[-1]) + 1 if len(different) else 0)
        if same + period >= max(_REPEATS * period, _LEAST_TOKENS):
            return period
    return None


def loops(
    materials: Sequence[Material], candidate: Candidate, reference: ReferenceSide, steps: int
) -> tuple[int, tuple[LoopRun, ...]]:
    """Continue the prompts of `run_greedy`; how many, and those that end in a loop.

    Args:
        materials: Texts.
        candidate: The bundle.
        reference: With nothing asked.
        steps: New tokens of each; 0 for none.
    """
    found, prompts = [], 0
    for token_ids, count in grouped_prompts(materials, candidate.context, steps):
        prompts += len(token_ids)
        reference.ask_greedy(token_ids, count)
        theirs = candidate.continue_greedily(token_ids, count).tolist()
        ours = reference.read_greedy().token_ids
        for prompt, one, other in zip(token_ids, ours, theirs, strict=True):
            periods = loop_period(one), loop_period(other)
            if periods == (None, None):
                continue
            name, document = _owner(materials, prompt.tolist())
            texts = [
                shorten(candidate.tokens.decode(ids[-period:])) if period else ""
                for ids, period in zip((list(one), other), periods, strict=True)
            ]
            found.append(
                LoopRun(
                    slice=name,
                    document=document,
                    new_tokens=count,
                    reference_period=periods[0],
                    candidate_period=periods[1],
                    reference_text=texts[0],
                    candidate_text=texts[1],
                )
            )
    return prompts, tuple(found)


def _owner(materials: Sequence[Material], prompt: list[int]) -> tuple[str, int]:
    """Text and document that a prompt is the beginning of."""
    return next(
        (material.text.name, document.index)
        for material in materials
        for document in material.documents
        if document.token_ids[: len(prompt)].tolist() == prompt
    )
