"""What clients do: plain and streamed requests, by NVIDIA's client and over bare HTTP."""

from __future__ import annotations

import json
import queue
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Answer", "generate", "generate_stream", "infer", "inputs", "stream"]


@dataclass
class Answer:
    """A reply, joined from one response or many."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    responses: int = 0
    seed: int | None = None

    def add(self, text: str, token_ids: list[int], reason: str, seed: int | None) -> None:
        self.text += text
        self.token_ids += token_ids
        self.finish_reason = reason
        self.responses += 1
        self.seed = seed


def inputs(module: Any, given: dict[str, Any]) -> list[Any]:
    """Inputs of `tritonclient.grpc` or `tritonclient.http`."""
    found = []
    for name, value in given.items():
        kind, array = (
            "BYTES",
            np.array([value.encode()], object) if isinstance(value, str) else None,
        )
        if isinstance(value, bool):
            kind, array = "BOOL", np.array([value])
        elif isinstance(value, list):
            kind, array = "INT64", np.array(value, np.int64)
        elif isinstance(value, dict):
            array = np.array([json.dumps(value).encode()], object)
        tensor = module.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        found.append(tensor)
    return found


def _add(answer: Answer, result: Any) -> None:
    seed = result.as_numpy("seed")
    answer.add(
        result.as_numpy("text_output")[0].decode(),
        result.as_numpy("output_ids").tolist(),
        result.as_numpy("finish_reason")[0].decode(),
        None if seed is None or not len(seed) else int(seed[0]),
    )


def infer(module: Any, address: str, model: str, **given: Any) -> Answer:
    """One request, one response."""
    answer = Answer()
    with module.InferenceServerClient(address) as client:
        _add(answer, client.infer(model, inputs(module, given)))
    return answer


def stream(address: str, model: str, **given: Any) -> Answer:
    """One request over a gRPC stream."""
    import tritonclient.grpc as module

    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    answer = Answer()
    with module.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        client.async_stream_infer(model, inputs(module, {"stream": True, **given}))
        while not answer.finish_reason:
            result, error = arrived.get(timeout=60)
            if error is not None:
                raise error
            _add(answer, result)
    return answer


def _post(address: str, model: str, how: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://{address}/v2/models/{model}/{how}", json.dumps(body).encode(), method="POST"
    )
    return urllib.request.urlopen(request, timeout=60)


def _add_document(answer: Answer, document: dict[str, Any]) -> None:
    ids = document["output_ids"]
    seed = document.get("seed")
    answer.add(
        document["text_output"],
        ids if isinstance(ids, list) else [ids],
        document["finish_reason"],
        seed,
    )


def generate_stream(address: str, model: str, **body: Any) -> Answer:
    """Server-sent events of Triton's generate extension."""
    answer = Answer()
    with _post(address, model, "generate_stream", {"stream": True, **body}) as response:
        for line in response:
            if line.startswith(b"data: "):
                document = json.loads(line.removeprefix(b"data: "))
                assert "error" not in document, document
                _add_document(answer, document)
    return answer


def generate(address: str, model: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """Status and document of one response of the generate extension."""
    try:
        with _post(address, model, "generate", body) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
