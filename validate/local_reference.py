"""The reference without its process: what `ReferenceProcess` offers, computed when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from headport.validate.given_source import GivenSource
from headport.validate.records import Messages
from headport.validate.reference import Reference
from headport.validate.reference_process import ScoredBlock
from headport.validate.wire import (
    Continued,
    ContinueGreedily,
    Draw,
    Drawn,
    EncodeChats,
    Layers,
    Lens,
    Lensed,
    Ready,
    Score,
)

__all__ = ["LocalReference"]

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


class LocalReference:
    """Asks a `Reference` in this process; for whoever writes a store, and for tests."""

    def __init__(self, reference: Reference) -> None:
        self.inner = reference
        self._scores: list[Score] = []
        self._prompts: list[ContinueGreedily] = []
        self.seconds = 0.0

    def ready(self) -> Ready:
        """Facts of the model."""
        return self.inner.ready

    def encode(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of texts as the checkpoint's own tokenizer gives them."""
        return self.inner.encode(tuple(texts)).token_ids

    def encode_chats(self, chats: Sequence[Messages]) -> tuple[tuple[int, ...], ...]:
        """Token ids of conversations as the checkpoint's own chat template gives them."""
        return self.inner.encode_chats(EncodeChats(tuple(chats))).token_ids

    def ask_score(
        self,
        token_ids: Int64,
        *,
        hidden: bool = False,
        other_path: bool = False,
        source: GivenSource | None = None,
    ) -> None:
        """Ask for the logits of a window; `read_score` gets them."""
        self._scores.append(Score(tuple(token_ids.tolist()), hidden, other_path, source))

    def read_score(self, rows: int) -> Iterator[ScoredBlock]:
        """The oldest unanswered window, in blocks of at most `rows` positions."""
        scored, arrays = self.inner.score(self._scores.pop(0))
        self.seconds += scored.seconds
        bound, logits = np.array(scored.near_tie_bound), arrays[-1]
        for at in range(0, len(logits), rows):
            inside = slice(at, at + rows)
            hidden = arrays[0][inside] if scored.hidden_size else None
            yield ScoredBlock(at, logits[inside], bound[inside], hidden)

    def ask_greedy(self, prompts: Int64, steps: int, sources: Sequence[GivenSource] = ()) -> None:
        """Ask for greedy continuations of prompts [B, P]; `read_greedy` gets them."""
        rows = tuple(tuple(row) for row in prompts.tolist())
        self._prompts.append(ContinueGreedily(rows, steps, tuple(sources)))

    def read_greedy(self) -> Continued:
        """The oldest unanswered continuations."""
        asked = self._prompts.pop(0)
        return self.inner.continue_greedily(asked.token_ids, asked.steps, asked.sources)

    def draw(self, request: Draw) -> tuple[Drawn, Float32]:
        """Tokens drawn by the reference's sampler, and the logits [V] they were drawn from."""
        return self.inner.draw(request)

    def layer_states(self, token_ids: Int64, *, other_path: bool = False) -> Float32 | None:
        """The states between layers [stages, T, H]; None: the model has no such."""
        _, arrays = self.inner.layers(Layers(tuple(token_ids.tolist()), other_path))
        return arrays[0] if arrays else None

    def lens(self, token_ids: Int64) -> Lensed:
        """What the model would say after each layer, of tokens [T]."""
        return self.inner.lens(Lens(tuple(token_ids.tolist())))
