"""What the scheduler's thread works on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headport.errors import HeadportError
from headport.runtime.results import Token
from headport.runtime.row import Row
from headport.runtime.sampling.choice import Choice
from headport.runtime.scheduling.tickets import Ticket

__all__ = ["Chooser", "Job", "Listener", "RowRequest", "RowState", "Steps"]

Float32 = npt.NDArray[np.float32]
Listener = Callable[[int, Token], None]  # place of the row in its request, its new token
Steps = Iterator[None]  # one bounded piece of work per step; what it returns is the result


class Chooser(Protocol):
    """Chooses tokens."""

    def choose(self, hidden: Float32, rows: Sequence[Row]) -> list[Choice | HeadportError]:
        """One choice per row from its last hidden state, [N, H], or the error that ends it."""
        ...


@dataclass(eq=False)
class Job:
    """Work that is no row: scores, logits, beams."""

    steps: Steps
    ticket: Ticket
    counted: bool = False  # among the requests


@dataclass(eq=False)
class RowRequest:
    """What the rows of one request have in common."""

    ticket: Ticket
    rows: Sequence[Row]
    listener: Listener | None
    left: int  # rows that have not ended


@dataclass(eq=False)
class RowState:
    """One row on its way through a slot."""

    row: Row
    place: int  # in its request
    request: RowRequest
    slot: int = -1  # none yet
    fed: int = -1  # prompt tokens that are in the cache; -1: not begun
    hidden: Float32 | None = None  # [H], of the last token that was run, until a token is chosen

    @property
    def ticket(self) -> Ticket:
        """Of its request."""
        return self.request.ticket

    @property
    def prefilled(self) -> bool:
        """Whether all of its prompt has been run."""
        return self.fed == len(self.row.prompt_token_ids)
