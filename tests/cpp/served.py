"""A service that runs, as its tests ask it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from headport.runtime import Generation

MODEL = "tiny"


EXTRA = {"return_token_ids": True}


FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


# Replies enough that nobody waits for the end, also on a fast machine.
ENDLESS = {
    "n": 4000,
    "temperature": 1.0,
    "max_tokens": 60,
    "extra_body": EXTRA | {"eos_token_id": []},
}


class Served:
    """A running service."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        openai = pytest.importorskip("openai")
        self.process = process
        self.address = address
        self.client = openai.OpenAI(
            base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60
        )

    def ask(self, prompt: Any, **fields: Any) -> Any:
        return self.client.completions.create(model=MODEL, prompt=prompt, **fields)

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.address}/health", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)["stats"]
        return found

    def post(self, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            f"{self.address}/v1/completions", body, headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def stopped(self) -> tuple[int, str]:
        """Exit status and what was printed, once it is told to stop."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        return self.process.wait(60), self.process.stderr.read()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def same(choices: Any, replies: list[Generation]) -> None:
    assert [choice.token_ids for choice in choices] == [reply.token_ids for reply in replies]
    for n, (choice, reply) in enumerate(zip(choices, replies, strict=True)):
        assert choice.index == n
        assert choice.text == reply.text
        assert choice.finish_reason == FINISH[reply.finish_reason]
