"""The hook behind sampling: all replies to one prompt in, those to give back out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from headport.errors import RequestError
from headport.runtime.results import Generation
from headport.runtime.sampling.callbacks import ask_callback

__all__ = ["Rerank", "rerank_replies"]

Rerank: TypeAlias = Callable[[list[Generation]], Iterable[Generation]]


def rerank_replies(rerank: Rerank, replies: Sequence[Generation]) -> list[Generation]:
    """What the caller's hook makes of the replies to one prompt.

    It may put them in another order, leave some out, or give changed ones
    (`dataclasses.replace(reply, text=…)`).

    Raises:
        RequestError: If the hook fails, or gives anything but at least one `Generation`.
    """
    where = f"rerank, prompt {replies[0].index}"
    found = ask_callback(where, lambda: list(rerank(list(replies))))
    odd = [type(each).__name__ for each in found if not isinstance(each, Generation)]
    if odd or not found:
        raise RequestError(
            f"{where}: at least one Generation was expected back, {', '.join(odd) or 'none'} came"
        )
    return found
