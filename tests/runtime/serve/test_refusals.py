"""What the service refuses, by name and with a status."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from headport.runtime.serve.limits import ServiceLimits
from tests.runtime.serve.conftest import MODEL, post, running

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"extra_body": {"guidance": 2}}, "guidance is not a field"),
    "several at once": ({"best_of": 4, "echo": True}, "best_of=4 is not supported; echo=True"),
    "unknown id": ({"prompt": [3, 257]}, "prompt 0 holds 257, ids from 0 to 256 were expected"),
    "empty prompt": ({"prompt": ""}, "prompt 0 is empty"),
    "no prompt": ({"prompt": []}, "at least one prompt was expected"),
    "odd prompt": ({"prompt": 3}, "prompt: a text, a list of token ids"),
    "context": ({"max_tokens": 64}, "1 tokens and 64 more are to follow, but the context holds 64"),
    "range": ({"temperature": -1}, "temperature must be a number from 0"),
    "type": ({"temperature": "hot"}, "temperature must be a number from 0"),
    "no effect": ({"top_p": 0.5}, "would have no effect"),
    "tokens": ({"max_tokens": 2000}, "2000 tokens exceed 1024 per reply"),
    "replies": ({"n": 40, "temperature": 1}, "1 prompts times n=40 exceed 32 replies"),
    "bias": ({"logit_bias": {"x": 1}}, "logit_bias: a mapping such as"),
    "bias beyond": ({"logit_bias": {"300": 1}}, "logit_bias: 300"),
    "stream options": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "unknown field `include_obfuscation`",
    ),
    "logprobs": ({"logprobs": -1}, "logprobs must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(service: Any, case: str) -> None:
    import openai

    fields, message = REFUSED[case]
    with pytest.raises(openai.BadRequestError) as found:
        service.completions.create(**({"model": MODEL, "prompt": "a"} | fields))
    assert message in found.value.body["message"]
    assert found.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools="),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"messages": []}, "messages: at least one was expected"),
        ({"messages": [{"role": "user"}]}, "missing required field `content`"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": []}]},
            "unknown field `tool_calls`",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}]},
            "parts of type image are not supported",
        ),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "both set max_new_tokens"),
        ({"top_logprobs": 3}, "no effect without logprobs=true"),
    ],
)
def test_what_a_chat_cannot_do_is_refused(service: Any, fields: Any, message: str) -> None:
    import openai

    given = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]} | fields
    with pytest.raises(openai.BadRequestError) as found:
        service.chat.completions.create(**given)
    assert message in found.value.body["message"]


def test_bodies_that_are_none(make: Any) -> None:
    with running(make(), ServiceLimits(body_bytes=200)) as address:
        for body, status, message in (
            (b"", 400, "the body must be a JSON object"),
            (b"{", 400, "the body must be a JSON object"),
            (b"[1]", 400, "the body must be a JSON object"),
            (b"\xff\xfe", 400, "the body must be a JSON object"),
            (b'{"prompt": "a"}', 404, "None was asked for"),
            (b'{"prompt": "' + b"a" * 300 + b'"}', 413, "at most 200 bytes"),
        ):
            code, document = post(address, body)
            assert (code, message in document["error"]["message"]) == (status, True), document


def test_bodies_that_go_too_far(make: Any) -> None:
    prompt = b'{"model": "tiny", "prompt": "a", "temperature": 1'
    with running(make()) as address:
        for body, status, message in (
            (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "must be a JSON object"),
            (prompt + b"0" * 400 + b"}", 400, "temperature must be a number from 0"),
        ):
            code, document = post(address, body)
            assert (code, message in document["error"]["message"]) == (status, True), document


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/completions"), ("POST", "/v1/embed")])
def test_what_is_not_there_is_told_in_the_same_form(make: Any, method: str, path: str) -> None:
    with running(make()) as address:
        request = urllib.request.Request(f"{address}{path}", method=method)
        with pytest.raises(urllib.error.HTTPError) as found:
            urllib.request.urlopen(request, timeout=30)
        message = json.load(found.value)["error"]["message"]
    assert f"{method} {path}" in message and "POST /v1/completions" in message


def test_replies_that_the_bundle_presets_are_counted(make: Any) -> None:
    generator = make(defaults={"num_return_sequences": 3, "do_sample": True})
    body = b'{"model": "tiny", "prompt": ["a", "b"], "max_tokens": 1%s}'
    with running(generator, ServiceLimits(replies=4)) as address:
        code, document = post(address, body % b"")
        assert code == 400
        assert "2 prompts times n=3 exceed 4 replies" in document["error"]["message"]
        code, document = post(address, body % b', "n": 2')
        assert code == 200 and len(document["choices"]) == 4
