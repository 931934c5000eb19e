"""The options of a generation request, declared once, and what they amount to."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from headport.errors import HeadportError, RequestError
from headport.runtime.generation_config import Defaults
from headport.runtime.limits import check
from headport.runtime.sampling.sampler import filtering
from headport.runtime.sampling.settings import (
    Allowed,
    Beams,
    EarlyStopping,
    FixedIds,
    ProcessScores,
    Sampling,
    read_bias,
)

__all__ = ["Options", "Parameters", "Request", "check_ids", "resolve"]


class Options(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`; what is left out is as the bundle says."""

    max_new_tokens: int  # per prompt
    min_new_tokens: int  # no EOS before; 0 = off
    temperature: float  # 0 = greedy
    top_k: int  # 0 = off
    top_p: float  # 1 = off
    min_p: float  # 0 = off
    typical_p: float  # 1 = off
    epsilon_cutoff: float  # 0 = off
    eta_cutoff: float  # 0 = off
    repetition_penalty: float  # of prompt and reply; 1 = off
    presence_penalty: float  # of the reply; 0 = off
    frequency_penalty: float  # of the reply; 0 = off
    no_repeat_ngram_size: int  # of prompt and reply; 0 = off
    logit_bias: Mapping[int | tuple[int, ...], float] | Sequence[tuple[Sequence[int], float]]
    bad_words: Sequence[Sequence[int]]  # token sequences that are never completed
    suppress_tokens: Sequence[int]  # never chosen
    begin_suppress_tokens: Sequence[int]  # never the first new token
    allowed: Sequence[int] | Allowed | None  # the only tokens that may follow, or asked per step
    process_scores: ProcessScores | None  # the caller's own processor
    seed: int | Sequence[int] | None  # one for all prompts, or one per prompt; None = drawn
    n: int  # replies per prompt: samples, or the best beams
    num_beams: int  # 1 = no beam search
    length_penalty: float  # of beams: Σ ln p is divided by tokens to this power
    early_stopping: EarlyStopping  # of beams
    logprobs: int | None  # likelihood of each token and of this many most likely; None = none
    stop: str | Sequence[str]  # texts that end a reply
    eos_token_id: int | Sequence[int]  # tokens that end a reply; () = none
    rerank: Callable[..., Any] | None  # gets a prompt's replies, gives those to return, in order


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
    n: int = 1
    beams: Beams = field(default_factory=Beams)
    logprobs: int | None = None
    rerank: Callable[..., Any] | None = None

    def parameters(self, max_new_tokens: int) -> Parameters:
        """What one prompt is continued with."""
        return Parameters(
            self.sampling,
            max_new_tokens,
            self.stop,
            self.eos_token_ids,
            self.n,
            self.beams,
            self.logprobs,
        )


@dataclass(frozen=True)
class Parameters:
    """What one prompt was continued with."""

    sampling: Sampling
    max_new_tokens: int
    stop: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    n: int = 1
    beams: Beams = field(default_factory=Beams)
    logprobs: int | None = None


# What a call may say of `Sampling` under the same name and in the same form.
_PLAIN = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
    "suppress_tokens",
    "begin_suppress_tokens",
    "process_scores",
)
_FILTERS = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def resolve(options: Options, defaults: Defaults, prompts: int) -> Request:
    """Check a call's options and fill the gaps from the bundle's defaults.

    Args:
        options: What the call says; None counts as left out.
        defaults: What the bundle says.
        prompts: Number of prompts.

    Raises:
        RequestError: If an option is unknown, out of range, would have no effect, or does not go
            with another.
    """
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        known = ", ".join(Options.__annotations__)
        raise RequestError(f"no option {', '.join(unknown)}; the options are {known}")
    given: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    check(given)
    limit = given.get("max_new_tokens", defaults.max_new_tokens)
    request = Request(
        sampling=_sampling(given, defaults),
        max_new_tokens=None if limit is None else int(limit),
        max_length=defaults.max_length,
        explicit_limit="max_new_tokens" in given,
        stop=_several(given.get("stop", defaults.stop)),
        eos_token_ids=tuple(map(int, _several(given.get("eos_token_id", defaults.eos_token_ids)))),
        seeds=_seeds(given.get("seed"), prompts),
        n=int(given.get("n", defaults.n)),
        beams=_beams(given, defaults),
        logprobs=None if "logprobs" not in given else int(given["logprobs"]),
        rerank=given.get("rerank"),
    )
    _check_together(request, given)
    return request


def _sampling(given: Mapping[str, Any], defaults: Defaults) -> Sampling:
    own: dict[str, Any] = {name: given[name] for name in _PLAIN if name in given}
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        if name in own:
            own[name] = tuple(map(int, own[name]))
    if "logit_bias" in given:
        own["logit_bias"] = read_bias(given["logit_bias"])
    if "bad_words" in given:
        own["bad_words"] = tuple(tuple(map(int, words)) for words in given["bad_words"])
    if "allowed" in given:
        allowed = given["allowed"]
        own["allowed"] = allowed if callable(allowed) else FixedIds(tuple(map(int, allowed)))
    if "temperature" in given:
        own["temperature"] = float(given["temperature"])
    asked = {name: given[name] for name in _FILTERS if name in given}
    sampling = Sampling(**(_fields(defaults.sampling) | own))
    if sampling.temperature == 0.0 and "temperature" not in given and filtering(Sampling(**asked)):
        raise RequestError(
            f"{', '.join(asked)} would have no effect, because this bundle decodes greedily "
            "where the call gives no temperature; add one, such as temperature=1.0"
        )
    return sampling


def _fields(sampling: Sampling) -> dict[str, Any]:
    return {each.name: getattr(sampling, each.name) for each in fields(Sampling)}


def _beams(given: Mapping[str, Any], defaults: Defaults) -> Beams:
    known = (each.name for each in fields(Beams))
    return Beams(**{name: given.get(name, getattr(defaults.beams, name)) for name in known})


def _check_together(request: Request, given: Mapping[str, Any]) -> None:
    """Refuse what is right alone and has no meaning together."""
    temperature, beams, n = request.sampling.temperature, request.beams, request.n
    ignored = [name for name in ("length_penalty", "early_stopping") if name in given]
    limit = request.max_new_tokens
    faults = (
        (
            beams.num_beams > 1 and temperature > 0.0,
            f"beam search is greedy: num_beams={beams.num_beams} was expected with temperature=0, "
            f"{temperature:g} was found; give temperature=0 or num_beams=1",
        ),
        (
            1 < beams.num_beams < n,
            f"n must be from 1 to num_beams={beams.num_beams}, {n} was given",
        ),
        (
            beams.num_beams == 1 and n > 1 and temperature == 0.0,
            f"n={n} greedy replies would all be equal; give a temperature above 0, or num_beams",
        ),
        (
            beams.num_beams == 1 and bool(ignored),
            f"{', '.join(ignored)} would have no effect without num_beams above 1",
        ),
        (
            beams.num_beams > 1 and request.logprobs is not None,
            "logprobs are not given for beams; their replies have a score",
        ),
        (
            {"min_new_tokens", "max_new_tokens"} <= set(given)
            and limit is not None
            and request.sampling.min_new_tokens > limit,
            f"min_new_tokens={request.sampling.min_new_tokens} is above max_new_tokens={limit}",
        ),
    )
    found = [message for wrong, message in faults if wrong]
    if found:
        raise RequestError("; ".join(found))


def check_ids(
    sampling: Sampling, eos_token_ids: Sequence[int], size: int, error: type[HeadportError]
) -> None:
    """Refuse ids that the vocabulary does not have.

    Args:
        sampling: Whose lists of ids are checked; a callback's are its own matter.
        eos_token_ids: End tokens.
        size: True size of the vocabulary.
        error: What to raise.

    Raises:
        HeadportError: `error`, naming each option with its unknown ids.
    """
    allowed = sampling.allowed.token_ids if isinstance(sampling.allowed, FixedIds) else ()
    named: dict[str, list[int]] = {
        "eos_token_id": list(eos_token_ids),
        "logit_bias": [i for words, _ in sampling.logit_bias for i in words],
        "bad_words": [i for words in sampling.bad_words for i in words],
        "suppress_tokens": list(sampling.suppress_tokens),
        "begin_suppress_tokens": list(sampling.begin_suppress_tokens),
        "forced_bos_token_id": [] if sampling.forced_bos is None else [sampling.forced_bos],
        "forced_eos_token_id": list(sampling.forced_eos),
        "allowed": list(allowed),
    }
    unknown = {name: sorted({i for i in ids if not 0 <= i < size}) for name, ids in named.items()}
    faults = [f"{name}: {_listed(ids)}" for name, ids in unknown.items() if ids]
    if faults:
        raise error(f"token ids from 0 to {size - 1} were expected; found {'; '.join(faults)}")


def _listed(ids: Sequence[int], most: int = 10) -> str:
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(map(str, ids[:most])) + more


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
