"""A request of Triton's → what to generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headport.errors import RequestError
from headport.runtime.prompts import Prompt
from headport.runtime.serve.fields import COMPLETION, Endpoint, options_of

__all__ = ["Asked", "read_request"]

Array = npt.NDArray[Any]
Tensors = Callable[[str], Array | None]  # an input by its name; None where it was not given

_PROMPTS = ("text_input", "input_ids", "messages")
# As the OpenAI service takes them, and what it has no fields for.
FIELDS = Endpoint(
    own=frozenset(),
    options={
        **COMPLETION.options,
        **{
            name: name
            for name in (
                *("max_new_tokens", "allowed", "num_beams", "length_penalty"),
                "early_stopping",
            )
        },
    },
    neutral={},
)
# Of the protocol, not of the model.
_PROTOCOL = frozenset({"binary_data_output"})
_RESERVED = "triton_"


@dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    prompt: Prompt
    options: dict[str, Any]  # of the generator
    stream: bool


def read_request(
    tensors: Tensors, parameters: Mapping[str, Any], chat_ids: Callable[[Any], list[int]]
) -> Asked:
    """Read a request's inputs.

    Args:
        tensors: Its inputs.
        parameters: Of the request: options, beside those of `sampling_parameters`.
        chat_ids: Messages → prompt, by the bundle's chat template.

    Raises:
        RequestError: If there is no prompt or more than one, an option is unknown or given twice,
            or an input cannot be read.
        BundleError: If there are messages and the bundle has no usable chat template.
    """
    given = [name for name in _PROMPTS if tensors(name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"one of the inputs {', '.join(_PROMPTS)} was expected, "
            f"{' and '.join(given) or 'none'} was given"
        )
    stream = tensors("stream")
    return Asked(
        prompt=_prompt(given[0], tensors, chat_ids),
        options=_options(tensors, parameters),
        stream=stream is not None and bool(stream.item()),
    )


def _prompt(name: str, tensors: Tensors, chat_ids: Callable[[Any], list[int]]) -> Prompt:
    if name == "input_ids":
        array = tensors(name)
        assert array is not None
        return [int(i) for i in array]
    text = _text(name, tensors)
    if name == "text_input":
        return text
    messages = _json(name, text, list[dict[str, Any]])
    if not messages:
        raise RequestError("messages: at least one was expected")
    return chat_ids(messages)


def _options(tensors: Tensors, parameters: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if tensors("sampling_parameters") is not None:
        text = _text("sampling_parameters", tensors)
        found = _json("sampling_parameters", text, dict[str, Any])
    own = {
        name: value
        for name, value in parameters.items()
        if name not in _PROTOCOL and not name.startswith(_RESERVED)
    }
    if twice := sorted(found.keys() & own.keys()):
        raise RequestError(
            f"{', '.join(twice)} stand in sampling_parameters and in the request's parameters; "
            "give each once"
        )
    found |= own
    unknown = sorted(found.keys() - FIELDS.options.keys())
    if unknown:
        known = ", ".join(sorted(FIELDS.options))
        raise RequestError(f"no option {', '.join(unknown)}; the options are {known}")
    return options_of(FIELDS, found)


def _text(name: str, tensors: Tensors) -> str:
    array = tensors(name)
    assert array is not None
    value = np.asarray(array).reshape(-1)[0]
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: UTF-8 was expected ({error})") from error


def _json(name: str, text: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        wanted = "a JSON object" if kind == dict[str, Any] else "a JSON list of objects"
        raise RequestError(f"{name}: {wanted} was expected ({error})") from error
