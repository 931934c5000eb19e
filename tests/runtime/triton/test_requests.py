"""What a request's inputs and parameters become."""

from __future__ import annotations

from typing import Any

import pytest

from headport.errors import RequestError
from headport.runtime.triton.requests import Asked, read_request
from tests.runtime.triton.fake_backend import Request


def read(parameters: dict[str, Any] | None = None, **inputs: Any) -> Asked:
    request = Request(**inputs)

    def tensors(name: str) -> Any:
        found = request.tensor(name)
        return None if found is None else found.as_numpy()

    return read_request(tensors, parameters or {}, lambda messages: [len(m) for m in messages])


def test_prompts() -> None:
    assert read(text_input="naïve").prompt == "naïve"
    assert read(input_ids=[5, 6]).prompt == [5, 6]
    assert read(messages=[{"role": "user"}, {"role": "user", "content": "a"}]).prompt == [1, 2]


def test_options_of_both_places() -> None:
    asked = read(
        {"temperature": 0.5, "triton_enable_empty_final_response": True, "binary_data_output": 1},
        text_input="a",
        sampling_parameters={"max_tokens": 4, "logit_bias": {"7": -1}, "stop": ["x"]},
        stream=True,
    )
    assert asked.options == {
        "temperature": 0.5,
        "max_new_tokens": 4,
        "logit_bias": {7: -1},
        "stop": ["x"],
    }
    assert asked.stream and not read(text_input="a", stream=False).stream


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "one of the inputs text_input, input_ids, messages was expected, none was given"),
        ({"text_input": "a", "input_ids": [1]}, "text_input and input_ids was given"),
        ({"text_input": b"\xff"}, r"text_input: UTF-8 was expected"),
        ({"messages": "{}"}, "messages: a JSON list of objects was expected"),
        ({"messages": "[]"}, "messages: at least one was expected"),
        ({"text_input": "a", "sampling_parameters": "top_k=3"}, "a JSON object was expected"),
        ({"text_input": "a", "sampling_parameters": {"logprobs": 2}}, "no option logprobs; the"),
        (
            {"text_input": "a", "sampling_parameters": {"max_tokens": 1, "max_new_tokens": 2}},
            "both set max_new_tokens|another field",
        ),
    ],
)
def test_refusals(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read(**inputs)


def test_an_option_is_given_once() -> None:
    with pytest.raises(RequestError, match="seed stand in sampling_parameters and in the request"):
        read({"seed": 1}, text_input="a", sampling_parameters={"seed": 2})
