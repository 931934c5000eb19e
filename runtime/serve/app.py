"""The service as an ASGI application."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from headport.errors import CancelledRequestError, HeadportError, RunError
from headport.runtime.async_generator import AsyncGenerator, AsyncSubmission
from headport.runtime.generator import Generator
from headport.runtime.serve.answers import CHAT, COMPLETION, Answer, Style
from headport.runtime.serve.faults import (
    BodyTooLargeError,
    Fault,
    UnknownModelError,
    fault_of,
)
from headport.runtime.serve.limits import ServiceLimits
from headport.runtime.serve.requests import Asked, read_chat, read_completion

__all__ = ["build_app"]

_log = logging.getLogger("headport.serve")
Read = Callable[[bytes], Asked]


def build_app(generator: Generator, name: str, limits: ServiceLimits | None = None) -> FastAPI:
    """An application that answers with one generator.

    It closes the generator when it is shut down; a server stops taking requests before that.

    Args:
        generator: Does the work. Make it with a `reply_limit`, or replies whose request names no
            number are as long as the bundle says.
        name: What clients call the model.
        limits: Of one request.
    """
    service = _Service(AsyncGenerator(generator), name, limits or ServiceLimits())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.generator.close()

    # No page of its own: its scripts would come from elsewhere. `docs/serving.md` has the fields.
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HeadportError, _answer_fault)
    app.add_exception_handler(HTTPException, _answer_unknown)
    app.add_exception_handler(Exception, _answer_fault)
    app.add_api_route("/health", service.health, methods=["GET"])
    app.add_api_route("/v1/models", service.models, methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", service.model, methods=["GET"])
    app.add_api_route("/v1/completions", service.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
    return app


class _Service:
    def __init__(self, generator: AsyncGenerator, name: str, limits: ServiceLimits) -> None:
        self.generator = generator
        self._name = name
        self._limits = limits

    async def health(self) -> Response:
        """200 while requests are taken, 503 after."""
        inner = self.generator.generator
        if inner.closed:
            return JSONResponse({"status": "closed"}, status_code=503)
        stats = await asyncio.to_thread(lambda: inner.stats)
        return JSONResponse(
            {"status": "ok", "model": self._name, "stats": dataclasses.asdict(stats)}
        )

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, model: str) -> Response:
        self._check_model(model)
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> Response:
        read = partial(read_completion, self._limits, self.generator.generator)
        return await self._answer(request, COMPLETION, read)

    async def chat(self, request: Request) -> Response:
        read = partial(read_chat, self._limits, self.generator.generator)
        return await self._answer(request, CHAT, read)

    def _model(self) -> dict[str, Any]:
        return {"id": self._name, "object": "model", "created": 0, "owned_by": "headport"}

    def _check_model(self, name: Any) -> None:
        if name != self._name:
            raise UnknownModelError(f"model {self._name!r} is served here, {name!r} was asked for")

    async def _answer(self, request: Request, style: Style, read: Read) -> Response:
        body = await _body(request, self._limits.body_bytes)
        # In a thread: a long conversation takes a while to become tokens.
        asked = await asyncio.to_thread(read, body)
        self._check_model(asked.model)
        answer = Answer(
            style,
            self._name,
            self.generator.generator.spell,
            token_ids=asked.token_ids,
            logprobs=asked.options.get("logprobs") is not None,
        )
        submission = self.generator.submit(
            asked.prompts, timeout=self._limits.seconds, tokens=asked.stream, **asked.options
        )
        await submission.start()  # what is wrong with the request is told with a status of its own
        if asked.stream:
            parts = _events(submission, answer, asked.usage_chunk)
            return StreamingResponse(parts, media_type="text/event-stream")
        return JSONResponse(answer.whole(await _unless_gone(request, submission)))


async def _body(request: Request, limit: int) -> bytes:
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise BodyTooLargeError(f"a body of at most {limit} bytes was expected, more came")
            parts.append(part)
    except ClientDisconnect as error:
        raise CancelledRequestError("the client left before its request was there") from error
    return b"".join(parts)


async def _unless_gone(request: Request, submission: AsyncSubmission) -> Any:
    """The replies; a client that hangs up before they are there cancels them."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        submission.cancel()

    watcher = asyncio.create_task(watch())
    try:
        async with submission:
            return await submission.replies()
    finally:
        watcher.cancel()


async def _events(
    submission: AsyncSubmission, answer: Answer, usage_chunk: bool
) -> AsyncIterator[bytes]:
    """Server-sent events. Closed by the server where the client has gone: that ends the request."""
    begun: set[int] = set()
    try:
        async with submission:
            async for place, token in submission:
                if place not in begun:
                    begun.add(place)
                    if (first := answer.first(place)) is not None:
                        yield _event(first)
                if (part := answer.part(place, token)) is not None:
                    yield _event(part)
            if usage_chunk:
                yield _event(answer.usage_part(await submission.replies()))
        yield b"data: [DONE]\n\n"
    except Exception as error:  # noqa: BLE001 - the status has been sent; the stream tells instead
        _note(error)
        yield _event(fault_of(error).body)


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


async def _answer_fault(_: Request, error: Exception) -> Response:
    _note(error)
    fault = fault_of(error)
    return JSONResponse(fault.body, status_code=fault.status, headers=fault.headers)


async def _answer_unknown(request: Request, error: Exception) -> Response:
    """An address or a method that the service does not have."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}: {error.detail}"
    addresses = "GET /health, GET /v1/models, POST /v1/completions, POST /v1/chat/completions"
    fault = Fault(
        error.status_code, "invalid_request_error", f"{what}; the service has {addresses}"
    )
    return JSONResponse(fault.body, status_code=fault.status, headers=error.headers)


def _note(error: Exception) -> None:
    # What a request is refused for is its sender's affair, a graph that fails is the service's.
    if not isinstance(error, HeadportError) or isinstance(error, RunError):
        _log.error("a request failed", exc_info=error)
