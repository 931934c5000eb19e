"""A service that runs in this process, on a free port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headport.runtime import Generator
from headport.runtime.serve.limits import ServiceLimits

MODEL = "tiny"


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
