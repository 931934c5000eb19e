"""The options of a generation request, declared once, and what they amount to."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from headport.errors import RequestError
from headport.runtime.generation_config import Defaults
from headport.runtime.limits import check
from headport.runtime.sampling.sampler import Sampling

__all__ = ["Options", "Parameters", "Request", "resolve"]


class Options(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`; what is left out is as the bundle says."""

    max_new_tokens: int  # per prompt
    temperature: float  # 0 = greedy
    top_k: int  # 0 = off
    top_p: float  # 1 = off
    min_p: float  # 0 = off
    seed: int | Sequence[int] | None  # one for all prompts, or one per prompt; None = drawn
    stop: str | Sequence[str]  # texts that end a reply
    eos_token_id: int | Sequence[int]  # tokens that end a reply; () = none


@dataclass(frozen=True)
class Request:
    """A call once the bundle's defaults have filled its gaps; the same for all its prompts."""

    sampling: Sampling
    max_new_tokens: int | None  # None: neither the call nor the bundle says
    max_length: int | None  # prompt and new tokens; counts where max_new_tokens is None
    explicit_limit: bool  # the call gave max_new_tokens, so it is not cut to the context
    stop: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    seeds: tuple[int, ...] | None  # one per prompt; None: drawn


@dataclass(frozen=True)
class Parameters:
    """What one prompt was continued with."""

    sampling: Sampling
    max_new_tokens: int
    stop: tuple[str, ...]
    eos_token_ids: tuple[int, ...]


def resolve(options: Options, defaults: Defaults, prompts: int) -> Request:
    """Check a call's options and fill the gaps from the bundle's defaults.

    Args:
        options: What the call says; None counts as left out.
        defaults: What the bundle says.
        prompts: Number of prompts.

    Raises:
        RequestError: If an option is unknown, out of range, or would have no effect.
    """
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        known = ", ".join(Options.__annotations__)
        raise RequestError(f"no option {', '.join(unknown)}; the options are {known}")
    given: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    check(given)
    limit = given.get("max_new_tokens", defaults.max_new_tokens)
    temperature = float(given.get("temperature", defaults.temperature))
    filters = {name: given[name] for name in ("top_k", "top_p", "min_p") if name in given}
    if temperature == 0.0 and "temperature" not in given and Sampling(**filters).filters:
        raise RequestError(
            f"{', '.join(filters)} would have no effect, because this bundle decodes greedily "
            "where the call gives no temperature; add one, such as temperature=1.0"
        )
    return Request(
        sampling=Sampling(
            temperature=temperature,
            top_k=int(given.get("top_k", defaults.top_k)),
            top_p=float(given.get("top_p", defaults.top_p)),
            min_p=float(given.get("min_p", defaults.min_p)),
        ),
        max_new_tokens=None if limit is None else int(limit),
        max_length=defaults.max_length,
        explicit_limit="max_new_tokens" in given,
        stop=_several(given.get("stop", defaults.stop)),
        eos_token_ids=tuple(map(int, _several(given.get("eos_token_id", defaults.eos_token_ids)))),
        seeds=_seeds(given.get("seed"), prompts),
    )


def _seeds(seed: Any, prompts: int) -> tuple[int, ...] | None:
    if seed is None:
        return None
    seeds = (int(seed),) * prompts if isinstance(seed, numbers.Integral) else tuple(map(int, seed))
    if len(seeds) != prompts:
        raise RequestError(
            f"one seed, or one for each of the {prompts} prompts, was expected; "
            f"{len(seeds)} were given"
        )
    return seeds


def _several(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str | numbers.Integral) else tuple(value)
