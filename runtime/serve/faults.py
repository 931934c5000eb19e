"""Errors → answers with a status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headport.errors import (
    BundleError,
    CancelledRequestError,
    ClosedError,
    DeadlineError,
    HeadportError,
    NonFiniteError,
    OverloadedError,
    RequestError,
)

__all__ = ["BodyTooLargeError", "Fault", "UnknownModelError", "fault_of"]


class BodyTooLargeError(RequestError):
    """A request's body is larger than the service takes."""


class UnknownModelError(RequestError):
    """A request names a model that is not served."""


@dataclass(frozen=True)
class Fault:
    """What a client is told."""

    status: int  # of HTTP
    kind: str
    message: str

    @property
    def body(self) -> dict[str, Any]:
        """As the OpenAI API words it."""
        return {"error": {"message": self.message, "type": self.kind, "param": None, "code": None}}

    @property
    def headers(self) -> dict[str, str]:
        """When to try again, where that helps."""
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


# The first that fits.
_KINDS: tuple[tuple[type[HeadportError], int, str], ...] = (
    (BodyTooLargeError, 413, "invalid_request_error"),
    (UnknownModelError, 404, "invalid_request_error"),
    (RequestError, 400, "invalid_request_error"),
    (OverloadedError, 429, "overloaded_error"),
    (CancelledRequestError, 499, "cancelled_error"),  # nobody reads it: the client has gone
    (DeadlineError, 504, "timeout_error"),
    (ClosedError, 503, "unavailable_error"),
    (BundleError, 501, "not_supported_error"),  # such as a chat without a template
    (NonFiniteError, 500, "model_error"),
)


def fault_of(error: BaseException) -> Fault:
    """What a client is told of an error; nothing of one that nobody expected."""
    for kind, status, name in _KINDS:
        if isinstance(error, kind):
            return Fault(status, name, str(error))
    if isinstance(error, HeadportError):
        return Fault(500, "server_error", str(error))
    return Fault(500, "server_error", "the service failed on this request; its log tells why")
