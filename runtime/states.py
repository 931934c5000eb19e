"""Texts that were read once: tokens and hidden states, and which positions are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from headport.errors import RequestError
from headport.runtime.limits import is_whole

__all__ = ["Positions", "States", "last_tokens", "pick"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
# Which tokens of each text: all of them, the last one, or places from 0 on (from the end below 0).
Positions = Literal["all", "last"] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class States:
    """What the model made of some texts; any number of heads can be asked about it.

    `hidden[b]` [n, H] are the hidden states of text b, one per token of `token_ids[b]` [n].
    """

    token_ids: tuple[tuple[int, ...], ...]
    hidden: tuple[Float32, ...]
    rectangular: bool = False  # the texts were given as one array, whose rows may end in padding

    def __len__(self) -> int:
        return len(self.token_ids)

    def where(self, token_id: int) -> list[list[int]]:
        """Positions of a token in each text, such as a mask's."""
        return [[n for n, each in enumerate(ids) if each == token_id] for ids in self.token_ids]


def pick(states: States, positions: Positions) -> tuple[Float32, list[int]]:
    """Hidden states at some positions of every text, one text after the other.

    Returns:
        [N, H], and how many of them each text has.

    Raises:
        RequestError: If a position does not exist, or positions are not given for each text.
    """
    lengths = [len(ids) for ids in states.token_ids]
    if isinstance(positions, str):
        if positions not in ("all", "last"):
            raise RequestError(
                f"positions: 'all', 'last' or a list per text was expected, {positions!r} was given"
            )
        chosen = [range(n) if positions == "all" else [n - 1] for n in lengths]
    else:
        chosen = [list(each) for each in positions]
    if len(chosen) != len(lengths):
        raise RequestError(
            f"positions: one list per text was expected: {len(lengths)}, {len(chosen)} given"
        )
    for b, (places, n) in enumerate(zip(chosen, lengths, strict=True)):
        if odd := [p for p in places if not (is_whole(p) and -n <= p < n)]:
            raise RequestError(f"positions: text {b} has {n} tokens, {odd} were asked for")
    found = [h[np.array(places, np.int64)] for h, places in zip(states.hidden, chosen, strict=True)]
    return np.concatenate(found), [len(places) for places in chosen]


def last_tokens(states: States, pad_id: int | None) -> list[list[int]]:
    """The place of each text's last token that is not padding, as `pick` takes it.

    Raises:
        RequestError: If a text is padding alone, or rows of an array may end in padding that the
            model gives no name.
    """
    if pad_id is None:
        if states.rectangular and len(states) > 1:
            raise RequestError(
                "the model names no padding token, so where the rows of an array end cannot be "
                "told; give each text as a list of its own length"
            )
        return [[len(ids) - 1] for ids in states.token_ids]
    found = []
    for b, ids in enumerate(states.token_ids):
        places = np.flatnonzero(np.array(ids) != pad_id)
        if not len(places):
            raise RequestError(f"text {b} is padding alone (token {pad_id}); it has no last token")
        found.append([int(places[-1])])
    return found
