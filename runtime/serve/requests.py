"""A request's body → what to generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headport.errors import RequestError
from headport.runtime.generator import Generator
from headport.runtime.prompts import Prompt
from headport.runtime.serve.fields import CHAT, COMPLETION, Endpoint, options_of
from headport.runtime.serve.limits import ServiceLimits
from headport.runtime.serve.prompts import conversation_ids

__all__ = ["Asked", "read_chat", "read_completion"]


@dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    model: str | None
    prompts: Sequence[Prompt]
    options: dict[str, Any]  # of the generator
    stream: bool
    usage_chunk: bool  # a stream ends with the counts of tokens
    token_ids: bool  # the answer holds them


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[_Part]
    name: str | None = None


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class _Flags(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None


def read_completion(limits: ServiceLimits, generator: Generator, body: bytes) -> Asked:
    """Read a body of `/v1/completions`.

    Raises:
        RequestError: If it is no JSON object, a field is not supported or has a wrong value, or a
            limit is exceeded.
    """

    def prompts(fields: Mapping[str, Any]) -> Sequence[Prompt]:
        prompt = fields.get("prompt")
        if isinstance(prompt, str) or (prompt and _ids(prompt)):
            return [prompt]
        if isinstance(prompt, list) and all(isinstance(p, str) or _ids(p) for p in prompt):
            return prompt
        raise RequestError("prompt: a text, a list of token ids, or a list of those was expected")

    default_n = generator.defaults.n
    return _read(body, COMPLETION, prompts, _whole_logprobs, limits, default_n=default_n)


def read_chat(limits: ServiceLimits, generator: Generator, body: bytes) -> Asked:
    """Read a body of `/v1/chat/completions`; messages become a prompt by the chat template.

    Raises:
        RequestError: As `read_completion`.
        BundleError: If the bundle has no usable chat template, or answers to a source.
    """

    def prompts(fields: Mapping[str, Any]) -> Sequence[Prompt]:
        messages = _convert(fields.get("messages"), list[_Message], "messages")
        if not messages:
            raise RequestError("messages: at least one was expected")
        return [conversation_ids(generator, [_plain(message) for message in messages])]

    default_n = generator.defaults.n
    return _read(body, CHAT, prompts, _chat_logprobs, limits, default_n=default_n)


def _read(
    body: bytes,
    endpoint: Endpoint,
    prompts: Callable[[Mapping[str, Any]], Sequence[Prompt]],
    logprobs: Callable[[Mapping[str, Any]], int | None],
    limits: ServiceLimits,
    *,
    default_n: int,
) -> Asked:
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body must be a JSON object: {error}") from error
    endpoint.check(fields)
    flags = _convert({k: fields.get(k) for k in _Flags.__struct_fields__}, _Flags, "body")
    options = options_of(endpoint, fields)
    if (asked := logprobs(fields)) is not None:
        options["logprobs"] = asked
    found = prompts(fields)
    limits.check(len(found), {"n": default_n} | options)
    return Asked(
        model=flags.model,
        prompts=found,
        options=options,
        stream=bool(flags.stream),
        usage_chunk=bool(flags.stream_options and flags.stream_options.include_usage),
        token_ids=bool(flags.return_token_ids),
    )


def _whole_logprobs(fields: Mapping[str, Any]) -> int | None:
    asked: int | None = fields.get("logprobs")
    return asked


def _chat_logprobs(fields: Mapping[str, Any]) -> int | None:
    asked, most = fields.get("logprobs"), fields.get("top_logprobs")
    if asked not in (None, True, False):
        raise RequestError(f"logprobs: true or false was expected, {asked!r} was given")
    if not asked:
        if most:
            raise RequestError("top_logprobs has no effect without logprobs=true")
        return None
    return 0 if most is None else most


def _plain(message: _Message) -> dict[str, Any]:
    content = message.content
    if not isinstance(content, str):
        other = [part.type for part in content if part.type != "text"]
        if other:
            raise RequestError(f"messages: parts of type {', '.join(other)} are not supported")
        content = "".join(part.text for part in content)
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": content, **named}


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(i, int) for i in value)


def _convert(value: Any, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}: {error}") from error
