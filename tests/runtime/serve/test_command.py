"""`headport serve` and the example, each as a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headport.cli import main
from headport.errors import UsageError
from headport.runtime import Generator
from headport.runtime.serve.limits import ServiceLimits

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "python-service"


def get(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return json.load(answer)


def post(address: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        address, data, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def process(*words: str | Path) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *map(str, words)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as found:
        try:
            yield found
        finally:
            found.kill()


@pytest.fixture(scope="module")
def expected(tiny_lowered: Path) -> list[int]:
    return Generator(tiny_lowered, threads=1).generate("The head", max_new_tokens=5)[0].token_ids


def test_serving_until_it_is_told_to_stop(tiny_lowered: Path, expected: list[int]) -> None:
    pytest.importorskip("fastapi")
    words = ("-m", "headport", "serve", tiny_lowered, "--port", "0", "--name", "mine")
    with process(*words, "--threads", "1", "--slots", "3", "--max-new-tokens", "6") as served:
        assert served.stdout is not None
        line = served.stdout.readline()
        found = re.search(r"mine at (http://127\.0\.0\.1:\d+)/v1, 3 slots of 64 tokens", line)
        assert found, line + served.stdout.read()
        address = found[1]
        body = {"model": "mine", "prompt": "The head", "max_tokens": 5, "return_token_ids": True}
        answer = post(f"{address}/v1/completions", body)
        assert answer["choices"][0]["token_ids"] == expected
        # Replies of requests that name no number are as long as the service allows.
        body = {"model": "mine", "prompt": "The head", "return_token_ids": True, "eos_token_id": []}
        assert len(post(f"{address}/v1/completions", body)["choices"][0]["token_ids"]) == 6
        assert get(f"{address}/v1/models")["data"][0]["id"] == "mine"
        served.send_signal(signal.SIGTERM)
        rest = served.stdout.read()
        assert served.wait(30) == 0
        assert rest.splitlines()[-1] == f"[2 requests, {len(expected) + 6} tokens]"


def test_the_example(tiny_lowered: Path, expected: list[int]) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with process(EXAMPLE / "service.py", tiny_lowered, "--port", str(port)) as served:
        address = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 60
        while True:
            try:
                assert get(f"{address}/health")["status"] == "ok"
                break
            except OSError:
                assert time.monotonic() < end and served.poll() is None
                time.sleep(0.05)
        ranked = post(
            f"{address}/rank", {"prompt": "The head", "continuations": [" is", "zq", "!"]}
        )
        scores = ranked["nats_per_token"]
        assert sorted(ranked["continuations"]) == [" is", "!", "zq"]
        assert scores == sorted(scores)
        generator = Generator(tiny_lowered, threads=1)
        start = generator.encode("The head")
        ids = start + generator.encode(ranked["continuations"][0])
        [score] = generator.score([ids], prompt_tokens=len(start))
        assert scores[0] == pytest.approx(score.mean, abs=1e-4)
        asked = subprocess.run(
            [sys.executable, EXAMPLE / "client.py", address],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert asked.returncode == 0, asked.stderr
        assert len(asked.stdout.splitlines()) >= 9


def test_a_port_that_is_taken(tiny_lowered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(tiny_lowered), "--port", str(port)]) == 2
    assert f"127.0.0.1:{port} cannot be listened on" in capsys.readouterr().err
    assert main(["serve", str(tiny_lowered), "--port", "70000"]) == 2


def test_limits_are_above_nothing(tiny_lowered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"replies=0, seconds=-1"):
        ServiceLimits(replies=0, seconds=-1)
    pytest.importorskip("fastapi")
    assert main(["serve", str(tiny_lowered), "--port", "0", "--timeout", "0"]) == 2
    assert "limits must be above 0: seconds=0" in capsys.readouterr().err


def test_a_missing_extra_is_named(
    tiny_lowered: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(tiny_lowered), "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert "serve needs the package 'uvicorn'" in error and "headport[serve]" in error
