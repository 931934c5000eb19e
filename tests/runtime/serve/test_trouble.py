"""Clients that leave, services that are full, slow or closed, and bundles that are broken."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from headport.errors import RunError
from headport.runtime import Generator
from headport.runtime.serve.limits import ServiceLimits
from tests.runtime.serve.conftest import EXTRA, MODEL, Client, post, running


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


def test_a_graph_that_fails_is_told_and_logged(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generator = make()

    def broken(*_: Any) -> Any:
        raise RunError("head.lm.onnx: ONNX Runtime failed while it ran the graph: no memory")

    with running(generator) as address:
        monkeypatch.setattr(generator._runner, "hidden", broken)
        status, answer = post(address, b'{"model": "tiny", "prompt": "a", "max_tokens": 2}')
    assert status == 500 and "ONNX Runtime failed" in str(answer)
    assert "a request failed" in caplog.text


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
