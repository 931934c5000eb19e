"""Replies and tokens → the bodies of answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headport.runtime.results import Choice, Generation, Token

__all__ = ["CHAT", "COMPLETION", "Answer", "Style"]

_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
Likely = Choice | Token  # both hold a token's logprob and the most likely ones


@dataclass(frozen=True)
class Style:
    """How one endpoint writes what others write otherwise."""

    prefix: str  # of answers' ids
    whole: str  # the `object` of a whole answer
    part: str  # the `object` of a part of a stream
    text: Callable[[str], dict[str, Any]]  # of a reply
    text_part: Callable[[str], dict[str, Any]]
    first_part: dict[str, Any] | None  # sent before the first token of a reply
    logprobs: Callable[[Sequence[Likely], Callable[[int], str]], dict[str, Any]]


class Answer:
    """One answer of a service, whole or in parts.

    Args:
        style: Of the endpoint.
        model: The name that the request gave.
        spell: Token id → its text.
        token_ids: They are wanted.
        logprobs: They are wanted.
    """

    def __init__(
        self,
        style: Style,
        model: str,
        spell: Callable[[int], str],
        *,
        token_ids: bool,
        logprobs: bool,
    ) -> None:
        self._style = style
        self._spell = spell
        self._token_ids = token_ids
        self._logprobs = logprobs
        self._head: dict[str, Any] = {
            "id": style.prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, replies: Sequence[Generation]) -> dict[str, Any]:
        """The body of an answer at once."""
        choices = [
            {
                "index": n,
                **self._style.text(reply.text),
                "finish_reason": _FINISH[reply.finish_reason],
                **self._details(reply.token_ids, reply.logprobs),
            }
            for n, reply in enumerate(replies)
        ]
        return {
            **self._head,
            "object": self._style.whole,
            "choices": choices,
            "usage": usage(replies),
        }

    def first(self, place: int) -> dict[str, Any] | None:
        """What is sent before the first token of a reply, if anything."""
        if self._style.first_part is None:
            return None
        return self._part(place, self._style.first_part, None, {})

    def part(self, place: int, token: Token) -> dict[str, Any] | None:
        """What is sent for a token; None where it says nothing yet."""
        if not (token.text or token.finish_reason or self._token_ids or self._logprobs):
            return None
        finish = None if token.finish_reason is None else _FINISH[token.finish_reason]
        details = self._details([token.token_id], [token])
        return self._part(place, self._style.text_part(token.text), finish, details)

    def usage_part(self, replies: Sequence[Generation]) -> dict[str, Any]:
        """What ends a stream that is to tell its counts."""
        return {
            **self._head,
            "object": self._style.part,
            "choices": [],
            "usage": usage(replies),
        }

    def _part(
        self, place: int, text: Mapping[str, Any], finish: str | None, details: Mapping[str, Any]
    ) -> dict[str, Any]:
        choice = {"index": place, **text, "finish_reason": finish, **details}
        return {**self._head, "object": self._style.part, "choices": [choice]}

    def _details(self, token_ids: Sequence[int], likely: Sequence[Likely]) -> dict[str, Any]:
        found: dict[str, Any] = {"logprobs": None}
        if self._logprobs:
            found["logprobs"] = self._style.logprobs(likely, self._spell)
        if self._token_ids:
            found["token_ids"] = list(token_ids)
        return found


def usage(replies: Iterable[Generation]) -> dict[str, int]:
    """Counts of tokens; a prompt counts once, however many replies it has."""
    found = list(replies)
    prompts = {reply.index: len(reply.prompt_token_ids) for reply in found}
    new = sum(len(reply.token_ids) for reply in found)
    asked = sum(prompts.values())
    return {"prompt_tokens": asked, "completion_tokens": new, "total_tokens": asked + new}


def _completion_logprobs(likely: Sequence[Likely], spell: Callable[[int], str]) -> dict[str, Any]:
    tokens = [spell(each.token_id) for each in likely]
    ends = [sum(map(len, tokens[:n])) for n in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [each.logprob for each in likely],
        "top_logprobs": [{spell(t.token_id): t.logprob for t in e.top_logprobs} for e in likely],
        "text_offset": ends,
    }


def _chat_logprobs(likely: Sequence[Likely], spell: Callable[[int], str]) -> dict[str, Any]:
    def one(token_id: int, logprob: float | None) -> dict[str, Any]:
        text = spell(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        one(each.token_id, each.logprob)
        | {"top_logprobs": [one(t.token_id, t.logprob) for t in each.top_logprobs]}
        for each in likely
    ]
    return {"content": content, "refusal": None}


COMPLETION = Style(
    prefix="cmpl-",
    whole="text_completion",
    part="text_completion",
    text=lambda text: {"text": text},
    text_part=lambda text: {"text": text},
    first_part=None,
    logprobs=_completion_logprobs,
)
CHAT = Style(
    prefix="chatcmpl-",
    whole="chat.completion",
    part="chat.completion.chunk",
    text=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    text_part=lambda text: {"delta": {"content": text}},
    first_part={"delta": {"role": "assistant", "content": ""}},
    logprobs=_chat_logprobs,
)
