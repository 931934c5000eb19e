"""What validation asks of a reference, wherever it runs, and of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headport.validate.documents import Tokens
from headport.validate.given_source import GivenSource
from headport.validate.records import Messages
from headport.validate.reference_process import ScoredBlock
from headport.validate.wire import Continued, Draw, Drawn, Lensed, Ready

__all__ = ["HeadsSide", "ReferenceSide", "Tokenizing", "TokenizingReference"]

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


class Tokenizing(Protocol):
    """A tokenizer that says where in a text its tokens lie."""

    def encode(self, text: str, *, special_tokens: bool = True) -> Tokens:
        """Token ids, with what the tokenizer itself adds or without, and how far each reaches."""
        ...

    def render(self, messages: Messages, reply: bool) -> str:
        """A conversation as the chat template writes it; `reply`: with a reply opened."""
        ...

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, special tokens not counted."""
        ...


class TokenizingReference(Protocol):
    """The tokenizer of the reference."""

    def ready(self) -> Ready:
        """Facts of the model."""
        ...

    def encode(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids as the checkpoint's own tokenizer gives them."""
        ...

    def encode_chats(self, chats: Sequence[Messages]) -> tuple[tuple[int, ...], ...]:
        """Token ids of conversations as the checkpoint's own chat template gives them."""
        ...


class HeadsSide(TokenizingReference, Protocol):
    """The reference of heads that choose no next token."""

    def ask_heads(self, token_ids: Int64) -> None:
        """Ask what every head says about a text [T]."""
        ...

    def read_heads(self) -> dict[str, dict[str, Float32]]:
        """The oldest unanswered text: head → its arrays by name."""
        ...


class ReferenceSide(TokenizingReference, Protocol):
    """The reference: a process, a store, or the model itself. Answers come in order."""

    seconds: float  # spent in forward passes of `read_score`

    def ask_score(
        self,
        token_ids: Int64,
        *,
        hidden: bool = False,
        other_path: bool = False,
        source: GivenSource | None = None,
    ) -> None:
        """Ask for the logits of a window [T], and for what goes into the head."""
        ...

    def read_score(self, rows: int) -> Iterator[ScoredBlock]:
        """The oldest unanswered window, in blocks of at most `rows` positions."""
        ...

    def ask_greedy(self, prompts: Int64, steps: int, sources: Sequence[GivenSource] = ()) -> None:
        """Ask for greedy continuations of prompts [B, P], each of its own source if any."""
        ...

    def read_greedy(self) -> Continued:
        """The oldest unanswered continuations."""
        ...

    def draw(self, request: Draw) -> tuple[Drawn, Float32]:
        """Tokens drawn by the reference's sampler, and the logits [V] they were drawn from."""
        ...

    def layer_states(self, token_ids: Int64, *, other_path: bool = False) -> Float32 | None:
        """The states between layers [stages, T, H] of tokens [T]; None: the model has no such."""
        ...

    def lens(self, token_ids: Int64) -> Lensed:
        """What the model would say after each of its layers, of tokens [T]."""
        ...
