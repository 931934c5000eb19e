"""What the fields of a request become. A field in no table is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headport.errors import RequestError

__all__ = ["CHAT", "COMPLETION", "Endpoint", "options_of"]


@dataclass(frozen=True)
class Endpoint:
    """The fields of one endpoint."""

    own: frozenset[str]  # that the endpoint itself reads
    options: Mapping[str, str]  # field → the generator's option
    neutral: Mapping[str, tuple[Any, ...]]  # not supported: the values that ask for nothing

    def check(self, body: Mapping[str, Any]) -> None:
        """Refuse what would be left undone.

        Raises:
            RequestError: Naming every field that is unknown, or not supported with its value.
        """
        known = {*self.own, *self.options, *_METADATA}
        faults = []
        for name, value in body.items():
            if name in known or value is None:
                continue
            if name not in self.neutral:
                faults.append(f"{name} is not a field of this endpoint")
            elif not any(value == each for each in self.neutral[name]):
                faults.append(f"{name}={value!r} is not supported")
        if faults:
            supported = ", ".join(sorted({*self.own, *self.options}))
            raise RequestError(f"{'; '.join(faults)}; leave it out. Supported are {supported}")


# These say something about the request and ask for nothing.
_METADATA = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})

_OPTIONS = {
    name: name
    for name in (
        "temperature",
        "top_p",
        "seed",
        "stop",
        "n",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        # What the OpenAI API does not have, under the generator's own names.
        "top_k",
        "min_p",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "min_new_tokens",
        "bad_words",
        "suppress_tokens",
        "begin_suppress_tokens",
        "eos_token_id",
        "condition",
    )
}
_SHARED = frozenset({"model", "stream", "stream_options", "return_token_ids"})
_NEUTRAL: dict[str, tuple[Any, ...]] = {"store": (False,), "service_tier": ("auto", "default")}

COMPLETION = Endpoint(
    own=_SHARED | {"prompt", "logprobs"},
    options=_OPTIONS | {"max_tokens": "max_new_tokens", "prefix": "prefix"},
    neutral=_NEUTRAL | {"best_of": (1,), "echo": (False,), "suffix": ("",)},
)
CHAT = Endpoint(
    own=_SHARED | {"messages", "logprobs", "top_logprobs"},
    options=_OPTIONS | {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"},
    neutral=_NEUTRAL
    | {
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none",),
    },
)


def options_of(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    """The generator's options that a body asks for; their ranges are checked by the generator.

    Raises:
        RequestError: If two fields mean the same option, or a value cannot be read.
    """
    found: dict[str, Any] = {}
    for name, option in endpoint.options.items():
        value = body.get(name)
        if value is None:
            continue
        if option in found:
            raise RequestError(f"{name} and another field both set {option}; give one of them")
        found[option] = _READ.get(name, _as_it_is)(value)
    return found


def _as_it_is(value: Any) -> Any:
    return value


def _bias(value: Any) -> Any:
    # JSON has no numbers as keys.
    try:
        return {int(token_id): bias for token_id, bias in value.items()}
    except (AttributeError, ValueError) as error:
        raise RequestError(
            f'logit_bias: a mapping such as {{"50": -1.5}} was expected, {value!r} was given'
        ) from error


def _condition(value: Any) -> Any:
    several = value if isinstance(value, list) else [value]
    if _numbers(value) or (several and all(_one_condition(each) for each in several)):
        return value
    raise RequestError(
        "condition: the name of a stored condition, a list of numbers, or a list with one of them "
        f"or null for each prompt was expected, {value!r} was given"
    )


def _one_condition(value: Any) -> bool:
    return value is None or isinstance(value, str) or _numbers(value)


def _numbers(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, int | float) and not isinstance(each, bool) for each in value)
    )


_READ: dict[str, Callable[[Any], Any]] = {"logit_bias": _bias, "condition": _condition}
