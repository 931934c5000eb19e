"""Replies, tokens and errors → responses of the python backend, through a request's sender."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.errors import (
    BundleError,
    CancelledRequestError,
    ClosedError,
    DeadlineError,
    HeadportError,
    OverloadedError,
    RequestError,
)
from headport.progress import say
from headport.runtime.results import Generation, Token

__all__ = ["Responder"]

Array = npt.NDArray[Any]

# The first that fits; all others are INTERNAL.
_CODES: tuple[tuple[type[HeadportError], str], ...] = (
    (RequestError, "INVALID_ARG"),
    (OverloadedError, "UNAVAILABLE"),
    (ClosedError, "UNAVAILABLE"),
    (DeadlineError, "UNAVAILABLE"),
    (CancelledRequestError, "CANCELLED"),
    (BundleError, "UNSUPPORTED"),
)


class Responder:
    """Answers one request; the last response ends it.

    Args:
        triton: The module `triton_python_backend_utils`.
        request: It is not touched after this, as its tensors go with the call that brought it.
    """

    def __init__(self, triton: Any, request: Any) -> None:
        self._triton = triton
        self._sender = request.get_response_sender()
        self._ended = False

    @property
    def cancelled(self) -> bool:
        """Whether the client has gone or has taken the request back."""
        # Asked after the last response, Triton ends with a segmentation fault.
        return not self._ended and bool(self._sender.is_cancelled())

    def token(self, token: Token, seed: int | None) -> None:
        """Send one token of a stream; the last one brings the seed and ends the request."""
        self._send(
            {
                "text_output": _texts([token.text]),
                "output_ids": np.array([token.token_id], np.int64),
                "reply_lengths": np.ones(1, np.int64),
                "finish_reason": _texts([token.finish_reason or ""]),
                **_seeds([seed]),
            },
            last=token.finish_reason is not None,
        )

    def replies(self, replies: Sequence[Generation]) -> None:
        """Send whole replies; their ids stand one after another."""
        ids = [token_id for reply in replies for token_id in reply.token_ids]
        self._send(
            {
                "text_output": _texts([reply.text for reply in replies]),
                "output_ids": np.array(ids, np.int64),
                "reply_lengths": np.array([len(reply.token_ids) for reply in replies], np.int64),
                "finish_reason": _texts([reply.finish_reason for reply in replies]),
                **_seeds([reply.seed for reply in replies]),
            },
            last=True,
        )

    def fail(self, error: BaseException) -> None:
        """Send an error; nothing of one that nobody expected, which the server's log holds."""
        if self._ended:
            return
        code = next((name for kind, name in _CODES if isinstance(error, kind)), "INTERNAL")
        message = str(error)
        if not isinstance(error, HeadportError):
            say("".join(traceback.format_exception(error)))
            message = "the service failed on this request; the server's log tells why"
        fault = self._triton.TritonError(message, getattr(self._triton.TritonError, code))
        self._finish(self._triton.InferenceResponse(error=fault))

    def _send(self, arrays: Mapping[str, Array], *, last: bool) -> None:
        tensors = [self._triton.Tensor(name, array) for name, array in arrays.items()]
        response = self._triton.InferenceResponse(output_tensors=tensors)
        if last:
            self._finish(response)
        else:
            self._sender.send(response)

    def _finish(self, response: Any) -> None:
        self._ended = True
        self._sender.send(response, flags=self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _texts(texts: Sequence[str]) -> Array:
    return np.array([text.encode() for text in texts], object)


def _seeds(seeds: Sequence[int | None]) -> dict[str, Array]:
    known = [seed for seed in seeds if seed is not None]
    return {"seed": np.array(known, np.uint64)} if known else {}
