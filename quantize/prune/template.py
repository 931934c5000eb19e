"""The tokens of a chat template: of what it writes by itself, whatever the messages say."""

from __future__ import annotations

import jinja2

from headport.bundle import Bundle
from headport.errors import BundleError, RequestError
from headport.quantize.prune.tokens import TokenTable
from headport.runtime.chat import chat_ids
from headport.runtime.text import Tokens

__all__ = ["template_ids"]

_FILE = "chat_template.jinja"
_ROLES = ("system", "user", "assistant", "tool")
_CONTENT = "0"
_CONVERSATIONS = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "tool"),
)


def template_ids(bundle: Bundle, table: TokenTable) -> set[int]:
    """Ids of every text that stands in a bundle's chat template, and of rendered conversations.

    A conversation shows how the fixed texts are split where they meet each other and the usual
    roles. One that the template refuses counts for nothing.
    """
    tokens = Tokens(bundle)
    found: set[int] = set()
    for source in _sources(bundle, tokens):
        for text in _texts(source):
            found |= set(table.encode(text))
    if not found:
        return found
    for role in _ROLES:
        found |= set(table.encode(role))
    for roles in _CONVERSATIONS:
        messages = [{"role": role, "content": _CONTENT} for role in roles]
        try:
            found |= set(chat_ids(bundle, tokens, messages, {}))
        except (BundleError, RequestError):
            continue
    return found


def _sources(bundle: Bundle, tokens: Tokens) -> list[str]:
    found = tokens.config.get("chat_template")
    sources = [each["template"] for each in found] if isinstance(found, list) else [found]
    file = bundle.path / _FILE
    if file.is_file():
        sources.append(file.read_text(encoding="utf-8"))
    return [source for source in sources if isinstance(source, str)]


def _texts(source: str) -> list[str]:
    # The lexer knows no tag by name, so a template with tags of its own can be read as well.
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    try:
        parts = list(environment.lex(source))
    except jinja2.TemplateSyntaxError:
        return []
    texts = [value for _, kind, value in parts if kind == "data"]
    strings = [value[1:-1] for _, kind, value in parts if kind == "string"]
    # As Jinja reads a string.
    texts += [s.encode("ascii", "backslashreplace").decode("unicode-escape") for s in strings]
    return texts
