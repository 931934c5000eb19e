"""What the reference would say after each of its layers, at a few positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headport.errors import UsageError
from headport.validate.analysis.records import Lens, LensLayer
from headport.validate.sides import ReferenceSide

__all__ = ["LENS_TOKENS", "look"]

LENS_TOKENS = 32  # tokens that are fed, and most that are shown


def look(
    reference: ReferenceSide, token_ids: Sequence[int], shown: int, spell: Callable[[int], str]
) -> Lens:
    """Read every layer of the reference through its head.

    Args:
        reference: A model that can be looked into; nothing asked.
        token_ids: Of a text; the first `LENS_TOKENS` are fed.
        shown: Positions to keep, the last ones.
        spell: Token id → text.

    Raises:
        UsageError: If it has no single state between its layers.
    """
    fed = np.asarray(token_ids[:LENS_TOKENS], np.int64)
    found = reference.lens(fed)
    if not found.choices:
        raise UsageError(
            f"--lens: {reference.ready().facts.model} shows no single state between its layers; "
            "leave --lens out"
        )
    final = found.choices[-1]
    last = len(found.choices) - 1

    def layer(number: int) -> LensLayer:
        choices = found.choices[number]
        same = sum(a == b for a, b in zip(choices, final, strict=True))
        return LensLayer(
            after="the embedding" if number == 0 else f"layer {number - 1}",
            choices=tuple(spell(token_id) for token_id in choices[-shown:]),
            probabilities=found.probabilities[number][-shown:],
            agreement=same / len(final),
            of_final=sum(found.of_final[number]) / len(final),
        )

    return Lens(
        positions=len(final),
        tokens=tuple(spell(int(token_id)) for token_id in fed[-shown:]),
        layers=tuple(layer(number) for number in range(last + 1)),
    )
