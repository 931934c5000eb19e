"""The python flavour in a real tritonserver: the generator's answers, for many at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headport.runtime import Generator
from tests.triton.clients import Answer, generate, generate_stream, infer, inputs, stream
from tests.triton.server import NEEDS_TRITON, Server

pytestmark = NEEDS_TRITON

REQUESTS = 32
PROMPTS = [f"{'The head is the last matrix. def add naïve café'[n : n + 9]} {n}" for n in range(32)]
# Every fourth greedy, the others with seeds of their own.
OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 8 + n % 5} | ({"temperature": 0.9, "top_k": 40, "seed": n} if n % 4 else {})
    for n in range(REQUESTS)
]


@pytest.fixture(scope="module")
def generator(tiny_lowered: Path) -> Iterator[Generator]:
    with Generator(tiny_lowered, threads=1) as found:
        yield found


@pytest.fixture(scope="module")
def expected(generator: Generator) -> list[Any]:
    return [
        generator.generate([p], **o)[0]  # type: ignore[arg-type]
        for p, o in zip(PROMPTS, OPTIONS, strict=True)
    ]


def at_once(ask: Callable[[int], Answer]) -> list[Answer]:
    """All requests at the same time, each by a client of its own."""
    ready = threading.Barrier(REQUESTS)

    def one(n: int) -> Answer:
        ready.wait(60)
        return ask(n)

    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(one, range(REQUESTS)))


def assert_same(found: list[Answer], expected: list[Any], *, streamed: bool) -> None:
    for answer, reply in zip(found, expected, strict=True):
        assert answer.token_ids == reply.token_ids
        assert (answer.text, answer.finish_reason) == (reply.text, reply.finish_reason)
        assert answer.responses == (len(reply.token_ids) if streamed else 1)
        assert answer.seed == reply.seed


def test_32_streams_over_grpc(server: Server, expected: list[Any]) -> None:
    found = at_once(
        lambda n: stream(server.grpc, "tiny", text_input=PROMPTS[n], sampling_parameters=OPTIONS[n])
    )
    assert_same(found, expected, streamed=True)


def test_32_streams_over_http(server: Server, expected: list[Any]) -> None:
    import json

    found = at_once(
        lambda n: generate_stream(
            server.http, "tiny", text_input=PROMPTS[n], sampling_parameters=json.dumps(OPTIONS[n])
        )
    )
    assert_same(found, expected, streamed=True)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_32_whole_replies(server: Server, expected: list[Any], protocol: str) -> None:
    module = pytest.importorskip(f"tritonclient.{protocol}")
    address = getattr(server, protocol)
    found = at_once(
        lambda n: infer(
            module, address, "whole", text_input=PROMPTS[n], sampling_parameters=OPTIONS[n]
        )
    )
    assert_same(found, expected, streamed=False)


def test_ids_messages_and_parameters(server: Server, generator: Generator) -> None:
    import json

    status, found = generate(
        server.http, "tiny", input_ids=[5, 6, 7], parameters={"max_tokens": 4, "n": 1}
    )
    reply = generator.generate([[5, 6, 7]], max_new_tokens=4)[0]
    assert (status, found["output_ids"], found["text_output"]) == (200, reply.token_ids, reply.text)
    messages = [{"role": "user", "content": "add"}]
    _, found = generate(
        server.http, "tiny", messages=json.dumps(messages), parameters={"max_tokens": 4}
    )
    prompt = generator.chat_ids(messages)
    assert found["output_ids"] == generator.generate([prompt], max_new_tokens=4)[0].token_ids


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"text_input": "a", "input_ids": [1]}, "text_input and input_ids was given"),
        ({"text_input": "a", "parameters": {"topk": 3}}, "no option topk; the options are"),
        ({"text_input": "a", "sampling_parameters": '{"top_p": 2}'}, "top_p must be a number from"),
        ({"input_ids": [999]}, "ids from 0 to 256 were expected"),
        ({"text_input": "a", "sampling_parameters": "{"}, "a JSON object was expected"),
    ],
)
def test_refusals(server: Server, body: dict[str, Any], says: str) -> None:
    status, found = generate(server.http, "tiny", **body)
    assert status == 400 and says in found["error"], (status, found)


def test_an_error_ends_a_stream(server: Server) -> None:
    grpc = pytest.importorskip("tritonclient.grpc")
    with pytest.raises(grpc.InferenceServerException, match="ids from 0 to 256"):
        stream(server.grpc, "tiny", input_ids=[999])


def test_plain_infer_of_a_streaming_model_is_refused_by_triton(server: Server) -> None:
    http = pytest.importorskip("tritonclient.http")
    with pytest.raises(http.InferenceServerException, match="decoupled transaction policy"):
        infer(http, server.http, "tiny", text_input="a")


def test_a_client_that_has_gone_frees_the_slot(server: Server) -> None:
    grpc = pytest.importorskip("tritonclient.grpc")
    # Half a minute of work for one slot, if it is not cancelled.
    long = {"max_new_tokens": 60, "eos_token_id": [], "n": 32, "temperature": 1.0}
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: None)
        for _ in range(10):
            given = {"input_ids": [5], "sampling_parameters": long}
            client.async_stream_infer("narrow", inputs(grpc, given))
        time.sleep(1.0)
        client.stop_stream(cancel_requests=True)
    started = time.monotonic()
    _, found = generate(server.http, "narrow", input_ids=[5], parameters={"max_tokens": 2})
    assert len(found["output_ids"]) == 2
    assert time.monotonic() - started < 5
