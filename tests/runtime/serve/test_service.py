"""The service, driven by the official client: the generator's answers, and clear refusals."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.runtime import Generation, Generator
from headport.runtime.serve.limits import ServiceLimits
from tests.runtime.serve.conftest import MODEL, Client, running

FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
EXTRA = {"return_token_ids": True}


@pytest.fixture(scope="module")
def generator(tiny_lowered: Path) -> Generator:
    return Generator(tiny_lowered, threads=1, slots=8)


@pytest.fixture(scope="module")
def other(tiny_lowered: Path) -> Generator:
    """What the service's answers are held against."""
    return Generator(tiny_lowered, threads=1, slots=8)


@pytest.fixture(scope="module")
def service(generator: Generator, client: Client) -> Iterator[Any]:
    with running(generator) as address:
        yield client(address)


def asked(n: int) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Fields of the API, the generator's options, and a prompt: another of each for every n."""
    tokens = 3 + n % 6
    prompt = [(n * 37 + i * 11) % 256 + 1 for i in range(1 + n % 9)]
    shared = (
        {},
        {"temperature": 1.0, "seed": n},
        {"temperature": 0.8, "top_p": 0.9, "seed": n, "stop": ["e", "t"]},
        {"temperature": 1.2, "frequency_penalty": 0.7, "presence_penalty": 0.3, "seed": 5},
        {"temperature": 1.0, "n": 3, "seed": n},
        {"logit_bias": {7: 3.5, 9: -100.0}},
    )[n % 6]
    own = ({}, {"top_k": 20}, {"min_p": 0.02, "repetition_penalty": 1.2})[n % 3]
    if "temperature" not in shared:
        own = {}
    fields = shared | {"max_tokens": tokens, "extra_body": own | EXTRA}
    if "logit_bias" in shared:
        fields["logit_bias"] = {str(k): v for k, v in shared["logit_bias"].items()}
    return fields, shared | own | {"max_new_tokens": tokens}, prompt


def same(choices: Any, replies: list[Generation]) -> None:
    assert len(choices) == len(replies)
    for choice, reply in zip(choices, replies, strict=True):
        assert choice.token_ids == reply.token_ids
        assert choice.text == reply.text
        assert choice.finish_reason == FINISH[reply.finish_reason]


def test_32_requests_at_once_get_what_the_generator_gives(
    service: Any, other: Generator, generator: Generator
) -> None:
    def ask(n: int) -> Any:
        fields, _, prompt = asked(n)
        return service.completions.create(model=MODEL, prompt=prompt, **fields)

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(32)))
    for n, answer in enumerate(answers):
        _, options, prompt = asked(n)
        replies = other.generate([prompt], **options)
        same(answer.choices, replies)
        new = sum(len(reply.token_ids) for reply in replies)
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == new
        assert answer.object == "text_completion" and answer.model == MODEL
    assert generator.stats.most_rows == 8


def test_a_streamed_answer_is_the_whole_one_in_parts(service: Any, other: Generator) -> None:
    def ask(n: int) -> list[Any]:
        fields, _, prompt = asked(n)
        stream = service.completions.create(
            model=MODEL,
            prompt=prompt,
            stream=True,
            stream_options={"include_usage": True},
            **fields,
        )
        return list(stream)

    with ThreadPoolExecutor(12) as pool:
        streams = list(pool.map(ask, range(12)))
    for n, chunks in enumerate(streams):
        _, options, prompt = asked(n)
        replies = other.generate([prompt], **options)
        *parts, last = chunks
        assert last.choices == [] and last.usage.prompt_tokens == len(prompt)
        for index, reply in enumerate(replies):
            own = [c.choices[0] for c in parts if c.choices[0].index == index]
            assert "".join(choice.text for choice in own) == reply.text
            assert [i for choice in own for i in choice.token_ids] == reply.token_ids
            assert [c.finish_reason for c in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].finish_reason == FINISH[reply.finish_reason]


def test_texts_and_several_prompts(service: Any, other: Generator) -> None:
    prompts = ["The head", "def add(a", "a"]
    answer = service.completions.create(
        model=MODEL, prompt=prompts, n=2, temperature=1.0, seed=4, max_tokens=5, extra_body=EXTRA
    )
    options = {"n": 2, "temperature": 1.0, "seed": 4, "max_new_tokens": 5}
    same(answer.choices, other.generate(prompts, **options))
    assert [choice.index for choice in answer.choices] == list(range(6))


def test_a_chat(service: Any, other: Generator) -> None:
    messages = [
        {"role": "system", "content": "naïve"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "caf"}, {"type": "text", "text": "é"}],
        },
    ]
    plain = [{"role": "system", "content": "naïve"}, {"role": "user", "content": "café"}]
    [reply] = other.generate([other.chat_ids(plain)], max_new_tokens=9, temperature=1.0, seed=2)
    common = {"model": MODEL, "messages": messages, "temperature": 1.0, "seed": 2}
    answer = service.chat.completions.create(max_completion_tokens=9, **common)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", reply.text)
    assert choice.finish_reason == FINISH[reply.finish_reason]
    chunks = list(service.chat.completions.create(max_tokens=9, stream=True, **common))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == reply.text
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_likelihoods(service: Any, other: Generator) -> None:
    common = {"temperature": 1.0, "seed": 2}
    [reply] = other.generate(["a"], max_new_tokens=4, logprobs=2, **common)
    expected = [choice.logprob for choice in reply.logprobs]
    answer = service.completions.create(model=MODEL, prompt="a", max_tokens=4, logprobs=2, **common)
    found = answer.choices[0].logprobs
    assert found.token_logprobs == pytest.approx(expected, abs=1e-4)
    assert found.tokens == [other.spell(i) for i in reply.token_ids]
    assert [len(top) for top in found.top_logprobs] == [2] * 4
    messages = [{"role": "user", "content": "a"}]
    answer = service.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=4, logprobs=True, top_logprobs=3, **common
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 4 and all(len(each.top_logprobs) == 3 for each in content)
    best = [max(each.top_logprobs, key=lambda t: t.logprob).logprob for each in content]
    assert all(each.logprob <= top + 1e-9 for each, top in zip(content, best, strict=True))


def test_the_models(service: Any) -> None:
    import openai

    assert [model.id for model in service.models.list()] == [MODEL]
    assert service.models.retrieve(MODEL).owned_by == "headport"
    with pytest.raises(openai.NotFoundError, match="'tiny' is served here, 'gpt' was asked for"):
        service.models.retrieve("gpt")


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


def test_fields_that_ask_for_nothing_are_taken(service: Any) -> None:
    answer = service.completions.create(
        model=MODEL, prompt="a", max_tokens=1, best_of=1, echo=False, suffix=None, user="someone"
    )
    assert len(answer.choices) == 1
    service.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a"}],
        max_tokens=1,
        response_format={"type": "text"},
        tools=[],
        store=False,
        metadata={"a": "b"},
    )


def post(address: str, body: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{address}/v1/completions", body, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


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


def test_a_client_that_leaves_within_its_body_is_no_fault(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    generator = make()
    with running(generator) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as leaver:
            leaver.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
            )
            time.sleep(0.1)  # so that it is read before it breaks off
        assert post(address, b'{"model": "tiny", "prompt": "a", "max_tokens": 2}')[0] == 200
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


class Slow:
    """Makes every run of a table's runner wait until it is let go."""

    def __init__(self, generator: Generator, seconds: float = 0.02) -> None:
        self.runner: Any = generator._runner
        self._seconds = seconds
        self._hidden = self.runner.hidden
        self._free = threading.Event()
        self.runner.hidden = self._wait

    def _wait(self, *given: Any) -> Any:
        self._free.wait(self._seconds)
        return self._hidden(*given)

    def release(self) -> None:
        self._free.set()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_is_cancelled_and_others_unharmed(
    make: Any, client: Client, stream: bool
) -> None:
    generator = make()
    [expected] = make().generate("cd", max_new_tokens=30, eos_token_id=())
    slow = Slow(generator)
    fields = {"model": MODEL, "max_tokens": 30, "extra_body": {"eos_token_id": []} | EXTRA}
    with running(generator) as address, ThreadPoolExecutor(1) as pool:
        good = pool.submit(client(address).completions.create, prompt="cd", **fields)
        until(lambda: generator.stats.requests == 1)
        leaver = client(address)
        if stream:
            answer = leaver.completions.create(prompt="ab", stream=True, **fields)
            next(iter(answer))
            answer.close()
        else:
            impatient = leaver.with_options(timeout=0.2)
            with pytest.raises(Exception, match="timed out"):
                impatient.completions.create(prompt="ab", **fields)
        until(lambda: generator.stats.cancelled == 1)
        slow.release()
        assert good.result().choices[0].token_ids == expected.token_ids
        assert generator.stats.new_tokens < 60


def test_logits_that_are_not_finite_fail_their_request_alone(
    make: Any, table: np.ndarray, client: Client
) -> None:
    import openai

    broken = table.copy()
    broken[7] = np.nan
    generator = make(broken)
    with running(generator) as address:
        service = client(address)
        fields = {"model": MODEL, "max_tokens": 3}
        with pytest.raises(openai.InternalServerError) as found:
            service.completions.create(prompt=[5, 7], **fields)
        assert "logits are not finite" in found.value.body["message"]
        assert found.value.body["type"] == "model_error"
        with pytest.raises(openai.APIError, match="logits are not finite"):
            list(service.completions.create(prompt=[5, 7], stream=True, **fields))
        answer = service.completions.create(prompt=[5, 6], extra_body=EXTRA, **fields)
        [reply] = make().generate([[5, 6]], max_new_tokens=3)
        assert answer.choices[0].token_ids == reply.token_ids


def test_a_full_or_slow_service_says_so(make: Any, client: Client) -> None:
    import openai

    generator = make(options={"slots": 1, "max_waiting": 1})
    slow = Slow(generator, 0.1)
    limits = ServiceLimits(seconds=3.0)  # 60 tokens take twice as long
    fields = {"model": MODEL, "prompt": "ab", "max_tokens": 60, "extra_body": {"eos_token_id": []}}
    with running(generator, limits) as address, ThreadPoolExecutor(2) as pool:
        service = client(address)
        late = [pool.submit(service.completions.create, **fields) for _ in range(2)]
        until(lambda: generator.stats.most_waiting == 1)
        with pytest.raises(openai.RateLimitError, match="1 rows and jobs wait") as refused:
            service.completions.create(**fields)
        assert refused.value.response.headers["Retry-After"] == "1"
        for each in late:
            with pytest.raises(openai.InternalServerError, match="was not done after") as found:
                each.result()
            assert found.value.status_code == 504
        slow.release()
        assert service.completions.create(**fields | {"max_tokens": 2})


def test_health(make: Any) -> None:
    generator = make()
    with running(generator) as address:
        generator.generate("a", max_new_tokens=2)
        with urllib.request.urlopen(f"{address}/health") as answer:
            document = json.load(answer)
        assert document["status"] == "ok" and document["stats"]["requests"] == 1
        generator.close()
        with pytest.raises(urllib.error.HTTPError) as closed:
            urllib.request.urlopen(f"{address}/health")
        assert closed.value.code == 503
        code, document = post(address, b'{"model": "tiny", "prompt": "a"}')
        assert code == 503 and document["error"]["type"] == "unavailable_error"
