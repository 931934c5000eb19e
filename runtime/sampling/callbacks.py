"""Asking a caller's own function: whatever it raises becomes an error of the request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from headport.errors import HeadportError, RequestError

__all__ = ["ask_callback"]

T = TypeVar("T")


def ask_callback(where: str, ask: Callable[[], T]) -> T:
    """What a callback gives.

    Args:
        where: The option and its place in the request, for the message.
        ask: Calls it.

    Raises:
        RequestError: If it fails.
    """
    try:
        return ask()
    except HeadportError:
        raise
    except (Exception, SystemExit) as error:  # `sys.exit` would end the generator's thread
        raise RequestError(f"{where} failed: {type(error).__name__}: {error}") from error
