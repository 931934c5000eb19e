"""A service that runs in this process, on a free port."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headport.runtime import Generator
from headport.runtime.serve.limits import ServiceLimits

MODEL = "tiny"
EXTRA = {"return_token_ids": True}


@contextmanager
def running(generator: Generator, limits: ServiceLimits | None = None) -> Iterator[str]:
    """Serve a generator; gives the address."""
    uvicorn = pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    from headport.runtime.serve.app import build_app

    app = build_app(generator, MODEL, limits)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive() and generator.closed


Client = Callable[[str], Any]


@pytest.fixture(scope="session")
def client() -> Client:
    """The official client, for an address."""
    openai = pytest.importorskip("openai")
    return lambda address: openai.OpenAI(
        base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60
    )


@pytest.fixture(scope="module")
def generator(tiny_lowered: Path) -> Generator:
    return Generator(tiny_lowered, threads=1, slots=8)


@pytest.fixture(scope="module")
def service(generator: Generator, client: Client) -> Iterator[Any]:
    with running(generator) as address:
        yield client(address)


def post(address: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """Status and document of a completion; the body is sent as it is."""
    request = urllib.request.Request(f"{address}/v1/completions", body, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
