"""Prompts: texts or ids in, checked ids out, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from headport.errors import PromptError
from headport.runtime.limits import is_whole
from headport.runtime.parameters import Request
from headport.runtime.text import Tokens

__all__ = ["DEFAULT_NEW_TOKENS", "Prompt", "fit", "read_prompts"]

Prompt = str | Sequence[int]
DEFAULT_NEW_TOKENS = 128  # per prompt, where neither the call nor the bundle says


def read_prompts(
    prompts: Prompt | Sequence[Prompt], tokens: Tokens, vocab_size: int
) -> list[list[int]]:
    """Token ids of each prompt.

    Args:
        prompts: Texts or id lists, or one of them. A text gets the special tokens that its
            tokenizer adds; an id list is taken as it is.
        tokens: The bundle's tokenizer.
        vocab_size: True size of the vocabulary.

    Raises:
        PromptError: Naming every prompt that is empty or holds unknown ids, with those ids.
    """
    single = isinstance(prompts, str) or (len(prompts) > 0 and all(is_whole(p) for p in prompts))
    several: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[list-item,assignment]
    if len(several) == 0:
        raise PromptError("at least one prompt was expected, none was given")
    found, faults = [], []
    for n, prompt in enumerate(several):
        ids = tokens.encode(prompt) if isinstance(prompt, str) else list(prompt)
        unknown = [i for i in ids if not (is_whole(i) and 0 <= int(i) < vocab_size)]
        if not ids:
            faults.append(f"prompt {n} is empty")
        if unknown:
            faults.append(
                f"prompt {n} holds {', '.join(map(repr, unknown))}, "
                f"ids from 0 to {vocab_size - 1} were expected"
            )
        found.append(ids)
    if faults:
        raise PromptError("; ".join(faults))
    return [[int(i) for i in ids] for ids in found]


def fit(prompts: Sequence[Sequence[int]], request: Request, max_context: int) -> list[int]:
    """How many tokens each prompt may be given.

    What the call asks for must fit the context; what the bundle or this module presets is cut to
    it.

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
        limits.append(min(wanted, most - len(prompt)))
    if faults:
        raise PromptError("; ".join(faults) + "; shorten the prompt or lower max_new_tokens")
    return limits
