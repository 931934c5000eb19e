"""A checked request → its rows; rows that have ended → replies."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.errors import RequestError
from headport.runner import Runner
from headport.runtime.beams import BeamSearch
from headport.runtime.parameters import Request
from headport.runtime.rerank import rerank_replies
from headport.runtime.results import Generation
from headport.runtime.row import Row
from headport.runtime.sampling.chooser import Chooser
from headport.runtime.sources import ReadSource
from headport.runtime.text import TextStream, Tokens

__all__ = ["RowMaker", "beam_steps", "check_streamed", "replies_of"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

_SEED_BITS = 53  # drawn seeds survive JSON readers that know only float64


@dataclass(frozen=True)
class RowMaker:
    """Makes the rows of one checked request."""

    request: Request
    prompts: Sequence[list[int]]  # token ids of each
    limits: Sequence[int]  # most new tokens of each
    tokens: Tokens
    watched: bool  # text is wanted with every token
    sources: Sequence[ReadSource | None]  # of each
    conditions: Sequence[Float32 | None]  # vectors [H] of each

    def rows(self) -> list[Row]:
        """The samples of the first prompt, then those of the second, and so on."""
        seeds = [_seed(self.request, n) for n in range(len(self.prompts))]
        return [
            self._row(n, seed, sample)
            for n, seed in enumerate(seeds)
            for sample in range(self.request.n)
        ]

    def searches(
        self, runner: Runner, chooser: Chooser, ids: Int64, chunk: int
    ) -> list[BeamSearch]:
        """A beam search for each prompt, with arguments as `BeamSearch` has them."""
        return [
            BeamSearch(runner, chooser, partial(self._row, n, _seed(self.request, n)), ids, chunk)
            for n in range(len(self.prompts))
        ]

    def _row(self, n: int, seed: int | None, sample: int = 0) -> Row:
        stop = self.request.stop
        return Row(
            index=n,
            prompt_token_ids=self.prompts[n],
            parameters=self.request.parameters(self.limits[n]),
            seed=seed,
            text=TextStream(self.tokens, stop),
            watched=self.watched or bool(stop),
            source=self.sources[n],
            condition=self.conditions[n],
            sample=sample,
        )


def check_streamed(request: Request) -> None:
    """Refuse what has more than one reply, or none before its end.

    Raises:
        RequestError: Naming each option that asks for it.
    """
    given = {"n": request.n, "num_beams": request.beams.num_beams}
    faults = [f"{name}={value}" for name, value in given.items() if value > 1]
    faults += ["rerank"] if request.rerank is not None else []
    if faults:
        raise RequestError(
            f"a stream gives one reply as it comes, so {', '.join(faults)} cannot be streamed; "
            "use generate"
        )


def beam_steps(searches: Sequence[BeamSearch]) -> Generator[None, None, list[Row]]:
    """A job that searches one prompt after the other, and returns the rows of all replies."""
    found = []
    for search in searches:
        while not search.done:
            search.step()
            yield
        found += search.replies()
    return found


def _seed(request: Request, index: int) -> int | None:
    if request.seeds is not None:
        return request.seeds[index]
    return secrets.randbits(_SEED_BITS) if request.sampling.temperature > 0.0 else None


def replies_of(rows: Sequence[Row], rerank: Callable[..., Any] | None) -> list[Generation]:
    """Replies of rows that have ended, in order; each prompt's reranked where that is asked for."""
    by_prompt: dict[int, list[Generation]] = {}
    for row in rows:
        by_prompt.setdefault(row.index, []).append(_generation(row))
    found = (rerank_replies(rerank, each) if rerank else each for each in by_prompt.values())
    return [reply for each in found for reply in each]


def _generation(row: Row) -> Generation:
    assert row.finish_reason is not None
    return Generation(
        text=row.text.text,
        token_ids=row.token_ids,
        finish_reason=row.finish_reason,
        seed=row.seed,
        prompt_token_ids=row.token_prompt,
        parameters=row.parameters,
        index=row.index,
        sample=row.sample,
        logprobs=row.logprobs,
        score=row.score,
    )
