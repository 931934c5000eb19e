"""Prompts of several parts: text, ids, and rows of embeddings such as an image encoder gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from headport.errors import PromptError
from headport.given_rows import GivenRows, PromptIds
from headport.runtime.prompts import unknown_ids
from headport.runtime.text import Tokens

__all__ = ["Part", "Parts", "read_parts", "token_ids_of"]

Part = str | Sequence[int] | npt.NDArray[Any]


class Parts:
    """One prompt: `Parts("Describe ", features, " in a word:")`.

    A float array [n, E] stands for n tokens: the model reads its rows in the place of those that it
    looks up, as transformers' `inputs_embeds` has them. A text that comes first gets the special
    tokens that the tokenizer puts before a prompt; texts after other parts get none.

    Args:
        *parts: Texts, lists of ids, and float arrays.
    """

    def __init__(self, *parts: Part) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        named = [f"float {list(p.shape)}" if _is_rows(p) else repr(p) for p in self.parts]
        return f"Parts({', '.join(named)})"


def _is_rows(part: object) -> TypeGuard[npt.NDArray[Any]]:
    return isinstance(part, np.ndarray) and part.dtype.kind == "f"


_EXPECTED = (
    "a text, a list of ids or a NumPy array of float rows [n, E] was expected; a tensor becomes "
    "one by .numpy()"
)


def _is_flat(part: object) -> TypeGuard[Sequence[int]]:
    # A list of single values, which may be ids.
    listed = isinstance(part, Sequence) or (isinstance(part, np.ndarray) and part.ndim == 1)
    return listed and not any(hasattr(each, "__len__") for each in part)  # type: ignore[attr-defined]


def _named(part: Any) -> str:
    shape = getattr(part, "shape", None)
    return type(part).__name__ if shape is None else f"{type(part).__name__} {list(shape)}"


def read_parts(given: Parts, tokens: Tokens, vocab_size: int, rows: GivenRows | None) -> PromptIds:
    """Ids of a prompt; those below 0 stand for its rows, for as long as the list is kept.

    Args:
        given: The prompt.
        tokens: The bundle's tokenizer.
        vocab_size: True size of the vocabulary.
        rows: Keeps them; None of a bundle that takes none.

    Raises:
        PromptError: Naming every part that cannot be read.
    """
    found, faults = PromptIds(), []
    blocks: list[object] = []
    for n, part in enumerate(given.parts):
        if isinstance(part, str):
            found += _text_ids(part, tokens, first=n == 0)
        elif not _is_rows(part):
            if not _is_flat(part):
                faults.append(f"part {n} is {_named(part)}, {_EXPECTED}")
            elif unknown := unknown_ids(part, vocab_size):
                faults.append(f"part {n} holds {unknown}, or float rows [n, E]")
            else:
                found += [int(i) for i in part]
        elif fault := _row_fault(part, rows):
            faults.append(f"part {n} {fault}")
        elif rows is not None and len(part):
            added = rows.add(part)
            found += added
            blocks += added.blocks
    if not faults and not found:
        faults.append("it is empty")
    if faults:
        raise PromptError("; ".join(faults))
    found.blocks = blocks
    return found


def _text_ids(text: str, tokens: Tokens, *, first: bool) -> list[int]:
    return (tokens.leading_ids() if first else []) + tokens.encode(text, add_special_tokens=False)


def _row_fault(part: npt.NDArray[Any], rows: GivenRows | None) -> str:
    if rows is None:
        return (
            "is an array of embeddings, and prompts of this bundle are tokens alone; export the "
            "model with --inputs-embeds"
        )
    if part.ndim != 2 or part.shape[1] != rows.size:
        return f"is {list(part.shape)}, [rows, {rows.size}] was expected"
    if not rows.holds(part):
        return "holds values that are not finite in the type of the bundle"
    return ""


def token_ids_of(prompt: Sequence[int]) -> list[int]:
    """The tokens of a prompt, without its rows of embeddings."""
    return [i for i in prompt if i >= 0]
