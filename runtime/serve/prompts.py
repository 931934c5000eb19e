"""What a service can be asked: texts, ids and conversations, never features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headport.bundle import Bundle
from headport.errors import BundleError, UsageError
from headport.runtime.generator import Generator

__all__ = ["check_prompts", "conversation_ids"]


def check_prompts(bundle: Bundle, service: str) -> None:
    """Refuse a bundle that no request can ask.

    Args:
        bundle: The bundle.
        service: What would serve it, in words.

    Raises:
        UsageError: If it answers to features.
    """
    source = bundle.manifest.source
    if source is not None and source.vocab_size is None:
        raise UsageError(
            f"{bundle.path} answers to features [bins, frames], {service} takes texts and token "
            "ids; use headport.runtime.Generator in a service of your own"
        )


def conversation_ids(generator: Generator, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """A conversation as a prompt, by the bundle's chat template.

    Raises:
        BundleError: If the bundle has no usable chat template, or answers to a source.
        RequestError: If the template refuses the messages.
    """
    if generator.bundle.manifest.source is not None:
        raise BundleError(
            "an encoder-decoder bundle has no conversations; give its source as the prompt of a "
            "completion"
        )
    return generator.chat_ids(messages)
