"""The candidate: every head of a bundle that chooses no next token, as the runtime runs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import UsageError
from headport.manifest import Head, TaskHead, TasksHead, ValueHead
from headport.runtime.heads import Heads
from headport.runtime.text import Tokens as BundleTokens
from headport.session import SessionSettings
from headport.validate.candidate import HEAD_NAME
from headport.validate.documents import Tokens
from headport.validate.records import Messages

__all__ = ["HeadCandidate"]

Int64 = npt.NDArray[np.int64]
Answers = dict[str, npt.NDArray[Any]]


class HeadCandidate:
    """Runs a bundle's heads on whole texts, and its tokenizer.

    Args:
        bundle: The bundle; its vocabulary is whole.
        settings: How sessions are opened.

    Raises:
        UsageError: If it has no head but `lm`, or reads a source.
    """

    def __init__(self, bundle: Bundle, settings: SessionSettings) -> None:
        manifest = bundle.manifest
        bundle.require_decoder_only("heads on texts", "use `headport validate`")
        self.entries: dict[str, Head | TaskHead] = {
            name: entry
            for name, entry in {**manifest.heads, **manifest.task_heads}.items()
            if name != HEAD_NAME
        }
        if not self.entries:
            raise UsageError(
                f"{bundle.path}: it has no head but {HEAD_NAME}; compare that with `headport "
                "validate`"
            )
        self.tokens = BundleTokens(bundle)
        self.vocab_size = manifest.vocabulary.size
        self.context = manifest.model.max_context
        self._heads = Heads(
            bundle,
            threads=settings.threads,
            provider=settings.provider,
            cpu_fallback=settings.cpu_fallback,
        )

    def encode(self, text: str, *, special_tokens: bool = True) -> Tokens:
        """Token ids, with what the tokenizer itself adds or without, and how far each reaches."""
        ids, ends = self.tokens.encode_with_ends(text, add_special_tokens=special_tokens)
        return Tokens(np.array(ids, np.int64), np.array(ends, np.int64))

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, special tokens not counted."""
        return len(self.tokens.encode(text, add_special_tokens=False))

    def render(self, messages: Messages, reply: bool) -> str:
        """Refused: what a head says of a conversation depends on how it was trained on them."""
        del messages, reply
        raise UsageError(
            "heads are compared on texts; write the conversation as the text that the head reads"
        )

    def answers(self, token_ids: Int64) -> dict[str, Answers]:
        """Head → its arrays by name, of one text [T]; see `headport.head_answers`."""
        states = self._heads.encode([token_ids.tolist()])
        found: dict[str, Answers] = {}
        for name, entry in self.entries.items():
            if isinstance(entry, ValueHead):
                found[name] = {"values": self._heads.values(states, name)[0]}
            elif isinstance(entry, TasksHead):
                every = {task: self._heads.tasks(states, task, name)[0] for task in entry.tasks}
                found[name] = {task: np.atleast_2d(each.scores) for task, each in every.items()}
            elif isinstance(entry, Head):
                found[name] = {"logits": self._heads.logits(states, name)[0]}
            else:
                found[name] = {"log_probs": self._heads.log_probs(states, name)[0]}
        return found
