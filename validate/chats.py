"""Conversations as documents: the text of the chat template, and which parts of it are replies."""

from __future__ import annotations

from collections.abc import Callable

from headport.errors import UsageError
from headport.validate.records import REPLIES, Messages

__all__ = ["Render", "write_chat"]

# messages, whether to open a reply → text, as the template writes it
Render = Callable[[Messages, bool], str]


def write_chat(messages: Messages, render: Render) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the spans of characters that the model is trained on.

    A reply's span begins where the template, asked to open a reply after the messages before it,
    stops, and ends with all that the template writes for the reply: its end-of-turn token is the
    model's own word as well.

    Args:
        messages: At least one of the assistant.
        render: The chat template.

    Raises:
        UsageError: If the template writes a message differently when others follow, so that no
            part of the text is that of one reply.
    """
    text = render(messages, False)
    spans = []
    for place, message in enumerate(messages):
        if message["role"] != REPLIES:
            continue
        opened = render(messages[:place], True) if place else ""
        closed = render(messages[: place + 1], False)
        if not (closed.startswith(opened) and text.startswith(closed)):
            raise UsageError(
                f"message {place} of a conversation: the chat template writes it differently when "
                "other messages follow or a reply is opened, so its tokens cannot be told from the "
                "prompt's; give the rendered text as prompt and completion instead"
            )
        spans.append((len(opened), len(closed)))
    return text, spans
