"""Greedy continuations on both sides: where they part, and whether rounding explains it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.validate.candidate import Candidate
from headport.validate.comparison import Material
from headport.validate.given_source import GivenSource
from headport.validate.report import GreedyRun
from headport.validate.sides import ReferenceSide
from headport.validate.wire import Continued
from headport.validate.worst import shorten

__all__ = ["PROMPTS_PER_TEXT", "PROMPT_TOKENS", "grouped_prompts", "run_greedy"]

Int64 = npt.NDArray[np.int64]

PROMPTS_PER_TEXT = 2
PROMPT_TOKENS = 32


@dataclass(frozen=True)
class _Prompt:
    material: int
    document: int
    token_ids: npt.NDArray[np.int64]  # [P]
    source: GivenSource | None


def run_greedy(
    materials: Sequence[Material], candidate: Candidate, reference: ReferenceSide, steps: int
) -> list[tuple[GreedyRun, ...]]:
    """Continue the beginning of each text's first documents, each side fed its own tokens.

    Of a pair of source and target the beginning is the decoder's start token alone. Prompts of
    equal length run together. The context bounds prompt and continuation.

    Args:
        materials: Texts.
        candidate: The bundle.
        reference: The PyTorch process, with nothing asked.
        steps: New tokens; 0 for none.

    Returns:
        Runs of each text.
    """
    runs: list[list[GreedyRun]] = [[] for _ in materials]
    length, steps = _lengths(candidate.context, steps)
    for group in _groups(materials, length) if steps > 0 else ():
        token_ids = np.stack([prompt.token_ids for prompt in group])
        sources = [prompt.source for prompt in group if prompt.source is not None]
        reference.ask_greedy(token_ids, steps, sources)
        found = candidate.continue_greedily(token_ids, steps, sources)
        wanted = reference.read_greedy()
        for row, prompt in enumerate(group):
            runs[prompt.material].append(_run(candidate, prompt, wanted, row, found[row].tolist()))
    return [tuple(of_text) for of_text in runs]


def _lengths(context: int, steps: int) -> tuple[int, int]:
    length = min(PROMPT_TOKENS, context // 2)
    return length, min(steps, context - length)


def grouped_prompts(
    materials: Sequence[Material], context: int, steps: int
) -> list[tuple[Int64, int]]:
    """The prompts [B, P] that `run_greedy` continues together, and for how many tokens."""
    length, steps = _lengths(context, steps)
    groups = _groups(materials, length) if steps > 0 else []
    return [(np.stack([prompt.token_ids for prompt in group]), steps) for group in groups]


def _groups(materials: Sequence[Material], length: int) -> list[list[_Prompt]]:
    """Prompts of at most `length` tokens, grouped by their length."""
    groups = defaultdict(list)
    for index, material in enumerate(materials):
        for document in material.documents[:PROMPTS_PER_TEXT]:
            fed = document.token_ids[: length if document.source is None else 1]
            prompt = _Prompt(index, document.index, fed, document.source)
            groups[len(prompt.token_ids)].append(prompt)
    return list(groups.values())


def _run(
    candidate: Candidate, prompt: _Prompt, answer: Continued, row: int, found: list[int]
) -> GreedyRun:
    wanted = answer.token_ids[row]
    margins, bounds = answer.margins[row], answer.near_tie_bound[row]
    at = next((i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b), None)
    return GreedyRun(
        document=prompt.document,
        prompt_tokens=len(prompt.token_ids),
        new_tokens=len(wanted),
        first_divergence=at,
        reference_margin=None if at is None else margins[at],
        near_tie_bound=None if at is None else bounds[at],
        near_tie=None if at is None else margins[at] <= bounds[at],
        reference_text=shorten(candidate.tokens.decode(wanted)),
        candidate_text=shorten(candidate.tokens.decode(found)),
    )
