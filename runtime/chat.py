"""Chat templates: messages → the text that the model was trained to continue.

A template is a program from whoever published the checkpoint, so it runs in Jinja's immutable
sandbox and sees plain data only. The environment is that of transformers 5.24
(`utils/chat_template_utils.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headport.bundle import Bundle
from headport.errors import BundleError, RequestError
from headport.runtime.text import Tokens

__all__ = ["chat_ids", "chat_text"]

_TEMPLATE_FILE = "chat_template.jinja"


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks replies for training; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - a plain set is what Jinja's class declares

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def chat_ids(
    bundle: Bundle, tokens: Tokens, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any]
) -> list[int]:
    """Token ids of a conversation, ready to be continued by the model.

    A template that writes the beginning-of-sequence token itself keeps it, and one that leaves it
    to the tokenizer gets it, so there is exactly one.

    Args:
        bundle: Holds the template.
        tokens: The bundle's tokenizer.
        messages: Mappings with `role` and `content`, oldest first.
        variables: More names the template may read, such as `tools`.

    Raises:
        BundleError: If the bundle has no chat template, or it cannot be parsed.
        RequestError: If the template refuses the messages, or they are not plain data.
    """
    text = chat_text(bundle, tokens, messages, variables)
    ids = tokens.encode(text, add_special_tokens=False)
    leading = tokens.leading_ids()
    return ids if ids[: len(leading)] == leading else leading + ids


def chat_text(
    bundle: Bundle, tokens: Tokens, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any]
) -> str:
    """A conversation as the bundle's template writes it; arguments and errors as `chat_ids`.

    The template is asked to open a reply, unless `variables` set `add_generation_prompt` to False.
    """
    try:
        plain = json.loads(json.dumps({"messages": list(messages), **variables}))
    except (TypeError, ValueError) as error:
        raise RequestError(f"messages must be plain data, as in JSON: {error}") from error
    odd = [m for m in plain["messages"] if not isinstance(m, dict)]
    if odd:
        raise RequestError(
            f"messages must be mappings with role and content, {odd[0]!r} was among them"
        )
    # An absent key is what templates test for; `None` would be written into the text.
    chat = [{k: v for k, v in message.items() if v is not None} for message in plain["messages"]]
    settings = {"add_generation_prompt": True} | tokens.special_tokens | plain
    try:
        return (
            _environment()
            .from_string(_template(bundle, tokens))
            .render(settings | {"messages": chat})
        )
    except jinja2.TemplateSyntaxError as error:
        raise BundleError(f"the chat template cannot be parsed: {error}") from error
    except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
        raise RequestError(f"the chat template refuses these messages: {error}") from error


def _template(bundle: Bundle, tokens: Tokens) -> str:
    path = bundle.path / _TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = tokens.config.get("chat_template")
    if isinstance(found, list):  # several by name, as older checkpoints have them
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    if not isinstance(found, str):
        raise BundleError(
            f"{bundle.path} has no chat template ({_TEMPLATE_FILE}); give the prompt as text"
        )
    return found


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    # Jinja's own filter escapes for HTML, which a model must not see.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)
