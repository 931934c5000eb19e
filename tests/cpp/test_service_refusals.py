"""What the example of a service in C++ refuses: fields, bodies, and words of its command line."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cpp.conftest import SANITIZER_OPTIONS
from tests.cpp.served import EXTRA, Served

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"extra_body": {"guidance": 2}}, "guidance is not a field"),
    "several at once": ({"best_of": 4, "echo": True}, "best_of=4 is not supported; echo=true"),
    "unknown id": ({"prompt": [3, 257]}, "prompt 0 holds 257, ids from 0 to 256 were expected"),
    "no prompt": ({"prompt": []}, "at least one prompt was expected"),
    "odd prompt": ({"prompt": [[1], {}]}, "prompt: a text, a list of token ids"),
    "stop": ({"stop": [3]}, "stop: a text, or a list of texts, was expected"),
    "logprobs": ({"logprobs": -1}, "logprobs: a whole number from 0 up"),
    "huge id": ({"prompt": [2**63]}, "a whole number was expected, 9223372036854775808"),
    "context": ({"max_tokens": 64}, "1 tokens and 64 more are to follow, but the context holds 64"),
    "long prompt": ({"prompt": [3] * 80}, "prompt 0 has 80 tokens and at least 1 more"),
    "range": ({"temperature": -1}, "temperature must be a number from 0"),
    "type": ({"temperature": "hot"}, 'temperature: a number was expected, "hot" was given'),
    "no effect": ({"top_p": 0.5}, "would have no effect"),
    "tokens": ({"max_tokens": 2000}, "2000 tokens exceed 1024 per reply"),
    "no tokens": ({"max_tokens": 0}, "max_tokens: a whole number from 1 up"),
    "replies": ({"n": 40, "temperature": 1}, "1 prompts times n=40 exceed 32 replies"),
    "bias": ({"logit_bias": {"x": 1}}, "logit_bias: a mapping such as"),
    "bias beyond": ({"logit_bias": {"300": 1}}, "logit_bias: 300"),
    "seed": ({"seed": -1}, "seed: a whole number from 0"),
    "condition": ({"extra_body": EXTRA | {"condition": 3}}, "condition: the name of a stored"),
    "no condition": ({"extra_body": EXTRA | {"condition": []}}, "was expected, [] was given"),
    "one of a list for two": (
        {"prompt": [[5, 9], [7]], "extra_body": EXTRA | {"condition": ["a"]}},
        "a list with one for each",
    ),
    "none is taken": ({"extra_body": EXTRA | {"condition": "formal"}}, "this bundle takes none"),
    "conditions": (
        {"extra_body": EXTRA | {"condition": ["a", None]}},
        "one for each of the 1 prompts, was expected; 2 were given",
    ),
    "stream options": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "unknown field include_obfuscation",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(service: Served, case: str) -> None:
    import openai

    fields, message = REFUSED[case]
    given = {"prompt": [5], "extra_body": EXTRA} | fields
    with pytest.raises(openai.BadRequestError) as found:
        service.ask(**given)
    assert message in found.value.body["message"]
    assert found.value.body["type"] == "invalid_request_error"


def test_bodies_that_are_none(start: Any) -> None:
    deep = b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    with start("--max-body-bytes", "20000") as service:
        for body, status, message in (
            (b"", 400, "the body must be a JSON object"),
            (b"{", 400, "the body must be a JSON object"),
            (b"[1]", 400, "the body must be a JSON object"),
            (b"\xff\xfe", 400, "the body must be a JSON object"),
            (b'{"prompt": [1], "return_token_ids": true}', 404, "none was asked for"),
            (b'{"prompt": [' + b"1," * 20000 + b"1]}", 413, "at most 20000 bytes"),
            (deep, 400, "nested too deep"),
            (b'{"prompt": [1], "temperature": 1' + b"0" * 400 + b"}", 400, "JSON object"),
        ):
            code, document = service.post(body)
            assert (code, message in document["error"]["message"]) == (status, True), document
        form = {"Content-Type": "multipart/form-data; boundary=x"}
        code, document = service.post(b"--x\r\n\r\n", **form)
        assert code == 400 and "a form came" in document["error"]["message"]
        assert service.ask([5], max_tokens=1, extra_body=EXTRA).choices


def test_a_body_without_end_is_refused_and_not_kept(start: Any) -> None:
    with start("--max-body-bytes", "1000") as service:
        host, port = service.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as sender:
            sender.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            with pytest.raises(OSError, match=r"[Bb]roken|reset"):
                for _ in range(10_000):
                    sender.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
        assert service.ask([5], max_tokens=1, extra_body=EXTRA).choices


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "a bundle's folder was expected"),
        (("one", "two"), "one bundle was expected, 'two' was given as well"),
        (("one", "--batch", "3"), "--batch is not an option"),
        (("one", "--port"), "--port: a value was expected"),
        (("one", "--port", "70000"), "a number up to 65535 was expected, 70000"),
        (("one", "--workers", "0"), "--workers: a whole number from 1 up was expected, '0'"),
        (("one", "--timeout", "-1"), "--timeout: a number of seconds above 0"),
        (("nowhere", "--port", "0"), "nowhere: a bundle folder was expected"),
    ],
)
def test_wrong_words_are_refused(program: Path, words: tuple[str, ...], message: str) -> None:
    done = subprocess.run(
        [program, *words], capture_output=True, text=True, check=False, env=SANITIZER_OPTIONS
    )
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_a_port_that_is_taken(program: Path, service: Served) -> None:
    port = service.address.rpartition(":")[2]
    done = subprocess.run(
        [program, "one", "--port", port], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"127.0.0.1:{port} cannot be listened on" in done.stderr
