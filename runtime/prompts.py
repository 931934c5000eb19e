"""Prompts: texts or ids in, checked ids out, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headport.errors import PromptError, RequestError
from headport.runtime.limits import is_whole
from headport.runtime.parameters import Request
from headport.runtime.text import Tokens

__all__ = [
    "DEFAULT_NEW_TOKENS",
    "Prompt",
    "fit",
    "read_masks",
    "read_prompts",
    "read_starts",
    "unknown_ids",
]

Prompt = str | Sequence[int]
# Per prompt, where neither the call nor the bundle says; runtime/cpp/src/generator/generator.cc has
# the same number.
DEFAULT_NEW_TOKENS = 128


def read_prompts(
    prompts: Prompt | Sequence[Prompt],
    tokens: Tokens,
    vocab_size: int,
    name: str = "prompt",
    *,
    first: int = 0,
) -> list[list[int]]:
    """Token ids of each prompt.

    Args:
        prompts: Texts or id lists, or one of them. A text gets the special tokens that its
            tokenizer adds; an id list is taken as it is.
        tokens: The bundle's tokenizer.
        vocab_size: True size of the vocabulary.
        name: What messages call one of them.
        first: Number of the first one there.

    Raises:
        PromptError: Naming every prompt that is empty or holds unknown ids, with those ids.
    """
    if not _is_listed(prompts):
        raise PromptError(
            f"a text, a list of ids, or a list of those was expected, {prompts!r} was given"
        )
    single = isinstance(prompts, str) or (len(prompts) > 0 and all(is_whole(p) for p in prompts))
    several: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[list-item,assignment]
    if len(several) == 0:
        raise PromptError(f"at least one {name} was expected, none was given")
    found, faults = [], []
    for n, prompt in enumerate(several, first):
        if not _is_listed(prompt):
            faults.append(f"{name} {n} is {prompt!r}, a text or a list of ids was expected")
            continue
        ids = tokens.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            faults.append(f"{name} {n} is empty")
        if unknown := unknown_ids(ids, vocab_size):
            faults.append(f"{name} {n} holds {unknown}")
        found.append(ids)
    if faults:
        raise PromptError("; ".join(faults))
    return [[int(i) for i in ids] for ids in found]


def unknown_ids(ids: Sequence[int], vocab_size: int) -> str:
    """The ids that a vocabulary does not have and those it has, for a message; none of them: ""."""
    unknown = [i for i in ids if not (is_whole(i) and 0 <= int(i) < vocab_size)]
    listed = ", ".join(map(repr, unknown))
    return listed and f"{listed}, ids from 0 to {vocab_size - 1} were expected"


def _is_listed(value: object) -> bool:
    return isinstance(value, str | Sequence | np.ndarray)


def read_masks(
    masks: Sequence[Sequence[int]] | None, prompts: Sequence[Sequence[int]]
) -> list[npt.NDArray[np.bool_]]:
    """Which ids of each prompt are tokens and which are padding, bool [T] each.

    Args:
        masks: 1 for a token and 0 for padding, as tokenizers give them; None = no padding.
        prompts: The ids, padding included.

    Raises:
        PromptError: Naming every mask of another length, with other values, of padding alone, or
            with padding between tokens.
    """
    if masks is None:
        return [np.ones(len(ids), np.bool_) for ids in prompts]
    if len(masks) != len(prompts):
        raise PromptError(f"one mask per text was expected: {len(prompts)}, {len(masks)} given")
    faults = []
    for n, (mask, ids) in enumerate(zip(masks, prompts, strict=True)):
        if len(mask) != len(ids):
            faults.append(f"mask {n} has {len(mask)} values for {len(ids)} ids")
        elif not set(mask) <= {0, 1}:
            faults.append(f"mask {n} holds more than 0 and 1")
        elif "1" not in (text := "".join(str(int(m)) for m in mask)):
            faults.append(f"mask {n} leaves no token")
        elif "0" in text.strip("0"):
            faults.append(f"mask {n} has padding between tokens")
    if faults:
        raise PromptError("; ".join(faults))
    return [np.asarray(mask, np.bool_) for mask in masks]


def read_starts(prompt_tokens: int | Sequence[int], texts: int) -> list[int]:
    """How many tokens at the start of each text are a prompt.

    Raises:
        RequestError: If they are not one number from 0 up, or one for each text.
    """
    starts = prompt_tokens if isinstance(prompt_tokens, Sequence) else [prompt_tokens] * texts
    if len(starts) == texts and all(is_whole(start) and start >= 0 for start in starts):
        return list(starts)
    raise RequestError(
        f"prompt_tokens: one number from 0 up, or one for each of the {texts} texts, was expected, "
        f"{prompt_tokens!r} was given"
    )


def fit(
    prompts: Sequence[Sequence[int]], request: Request, max_context: int, reply_limit: int = 0
) -> list[int]:
    """How many tokens each prompt may be given.

    What the call asks for must fit the context; what the bundle or this module presets is cut to
    it.

    Args:
        prompts: Token ids of each.
        request: What is asked of all.
        max_context: Tokens of a prompt and its reply together.
        reply_limit: Most tokens of a reply where the call names no number; 0 = none.

    Raises:
        PromptError: Naming every prompt that does not fit, with its numbers.
    """
    limits, faults = [], []
    for n, prompt in enumerate(prompts):
        most, why = max_context, "the context"
        wanted = request.max_new_tokens
        if wanted is None and request.max_length is not None:
            most, why = min(max_context, request.max_length), "the bundle's max_length"
            wanted = most - len(prompt)
        wanted = DEFAULT_NEW_TOKENS if wanted is None else wanted
        needed = len(prompt) + (wanted if request.explicit_limit else 1)
        if needed > most:
            new = wanted if request.explicit_limit else "at least 1"
            faults.append(
                f"prompt {n} has {len(prompt)} tokens and {new} more are to follow, "
                f"but {why} holds {most}"
            )
        if reply_limit and not request.explicit_limit:
            wanted = min(wanted, reply_limit)
        limits.append(min(wanted, most - len(prompt)))
    if faults:
        raise PromptError("; ".join(faults) + "; shorten the prompt or lower max_new_tokens")
    return limits
