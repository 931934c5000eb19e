"""What the python backend gives a `model.py`, as far as headport uses it."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

FINAL = 1


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self._array = name, array

    def as_numpy(self) -> np.ndarray:
        return self._array


class TritonError(Exception):
    INTERNAL, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, CANCELLED = range(5)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        super().__init__(message)
        self.code = code


class TritonModelException(Exception):  # noqa: N818 - the python backend's name
    pass


class Response:
    def __init__(self, output_tensors: Any = (), error: TritonError | None = None) -> None:
        self.outputs = {tensor.name: tensor.as_numpy() for tensor in output_tensors}
        self.error = error

    @property
    def text(self) -> str:
        return "".join(part.decode() for part in self.outputs["text_output"])


class Request:
    """A request and its sender; `wait` gives the responses once the last one has come."""

    def __init__(self, parameters: dict[str, Any] | None = None, **inputs: Any) -> None:
        self._parameters = json.dumps(parameters) if parameters is not None else ""
        self._inputs = {name: Tensor(name, _array(value)) for name, value in inputs.items()}
        self.responses: list[Response] = []
        self._ended = threading.Event()
        self.cancelled = False

    def parameters(self) -> str:
        return self._parameters

    def tensor(self, name: str) -> Tensor | None:
        return self._inputs.get(name)

    def get_response_sender(self) -> Request:
        return self

    def is_cancelled(self) -> bool:
        assert not self._ended.is_set(), "asked after the last response, which ends Triton"
        return self.cancelled

    def send(self, response: Response, flags: int = 0) -> None:
        assert not self._ended.is_set(), "a response after the last one"
        self.responses.append(response)
        if flags == FINAL:
            self._ended.set()

    def wait(self) -> list[Response]:
        assert self._ended.wait(60), "no last response"
        return self.responses

    def error(self) -> TritonError:
        [response] = self.wait()
        assert response.error is not None
        return response.error


def _array(value: Any) -> np.ndarray:
    if isinstance(value, bool):
        return np.array([value])
    if isinstance(value, str | bytes):
        return np.array([value.encode() if isinstance(value, str) else value], object)
    if isinstance(value, dict) or (value and isinstance(value[0], dict)):
        return np.array([json.dumps(value).encode()], object)
    return np.array(value, np.int64)


MODULE = SimpleNamespace(
    Tensor=Tensor,
    TritonError=TritonError,
    TritonModelException=TritonModelException,
    InferenceResponse=Response,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    get_input_tensor_by_name=lambda request, name: request.tensor(name),
)
