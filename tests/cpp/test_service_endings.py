"""How requests to the C++ service end early: clients that leave, limits, signals."""

from __future__ import annotations

import re
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headport.runtime import Generator
from tests.cpp.served import ENDLESS, EXTRA, MODEL, Served, same, until


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(
    start: Any, generator: Generator, stream: bool
) -> None:
    with start("--max-replies", "4000") as service:
        if stream:
            answer = service.ask([5], stream=True, **ENDLESS)
            next(iter(answer))
            answer.close()
        else:
            impatient = service.client.with_options(timeout=0.3)
            with pytest.raises(Exception, match="timed out"):
                impatient.completions.create(model=MODEL, prompt=[5], **ENDLESS)
        until(lambda: service.health()["failed"] == 1)
        assert service.health()["running"] == 0
        [reply] = generator.generate([[5, 9]], max_new_tokens=4)
        same(service.ask([5, 9], max_tokens=4, extra_body=EXTRA).choices, [reply])


def test_a_full_or_slow_service_says_so(start: Any) -> None:
    import openai

    limits = ("--max-replies", "4000", "--max-waiting", "1", "--timeout", "1.5")
    with start(*limits) as service, ThreadPoolExecutor(2) as pool:
        late = []
        for _ in range(2):
            late.append(pool.submit(service.ask, [5], **ENDLESS))
            until(lambda: service.health()["requests"] == len(late))
            until(lambda: service.health()["running"] == 1)
        with pytest.raises(openai.RateLimitError, match="1 requests wait") as refused:
            service.ask([5], max_tokens=1, extra_body=EXTRA)
        assert refused.value.response.headers["Retry-After"] == "1"
        for each in late:
            with pytest.raises(openai.InternalServerError, match=r"done after 1\.5") as found:
                each.result()
            assert found.value.status_code == 504
        until(lambda: service.health()["running"] == 0)
        assert service.ask([5], max_tokens=1, extra_body=EXTRA).choices


def test_stopping_lets_what_runs_end(start: Any, generator: Generator) -> None:
    import openai

    with start("--max-replies", "100") as service:
        fields = {"n": 100, "temperature": 1.0, "seed": 3, "max_tokens": 40}
        stream = service.ask([5], stream=True, extra_body=EXTRA, **fields)
        first = next(iter(stream))
        service.process.send_signal(signal.SIGTERM)
        until(lambda: closed(service))
        with pytest.raises(openai.InternalServerError, match="about to end") as found:
            service.ask([5], max_tokens=1, extra_body=EXTRA)
        assert found.value.status_code == 503
        found_ids: dict[int, list[int]] = {}
        for part in [first, *stream]:
            found_ids.setdefault(part.choices[0].index, []).extend(part.choices[0].token_ids)
        assert service.process.wait(60) == 0
        assert service.process.stderr is not None
        assert re.fullmatch(r"\[1 requests, \d+ tokens\]\n", service.process.stderr.read())
    assert sorted(found_ids) == list(range(100))
    expected = generator.generate([[5]], n=20, temperature=1.0, seed=3, max_new_tokens=40)
    assert [found_ids[n] for n in range(20)] == [reply.token_ids for reply in expected]


def closed(service: Served) -> bool:
    try:
        service.health()
    except urllib.error.HTTPError as error:
        return error.code == 503
    return False


def test_stopping_ends_what_takes_too_long(start: Any) -> None:
    import openai

    with start("--max-replies", "4000", "--grace", "0.2") as service:
        stream = service.ask([5], stream=True, **ENDLESS)
        next(iter(stream))
        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(service.stopped)
            with pytest.raises(openai.APIError, match="about to end"):
                list(stream)
            status, rest = stopped.result()
    assert status == 0, rest
